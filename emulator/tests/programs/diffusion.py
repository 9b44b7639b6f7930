"""diffusers: a UNet learns to denoise what a VAE encodes, and the VAE decodes."""

import warnings

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DModel

warnings.simplefilter("ignore")  # of the libraries
torch.manual_seed(0)
blocks = {"block_out_channels": (32, 32), "layers_per_block": 1, "norm_num_groups": 8}
vae = AutoencoderKL(
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    latent_channels=4,
    **blocks,
).npu()
unet = UNet2DModel(
    sample_size=8,
    in_channels=4,
    out_channels=4,
    attention_head_dim=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    **blocks,
).npu()
noising = DDPMScheduler()
images = torch.randn(2, 3, 16, 16).npu()
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
with torch.no_grad():
    latents = vae.encode(images).latent_dist.sample()
noise, times = torch.randn_like(latents), torch.tensor([10, 500]).npu()
losses = []
for _ in range(6):
    noisy = noising.add_noise(latents, noise, times)
    loss = torch.nn.functional.mse_loss(unet(noisy, times).sample, noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
reconstructed = vae(images).sample
reconstructed.square().mean().backward()
assert reconstructed.shape == images.shape
assert all(parameter.grad.isfinite().all() for parameter in vae.parameters())
