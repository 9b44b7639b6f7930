"""A loop of one's own by accelerate: accumulation, clipping, bfloat16."""

import warnings

import torch
from accelerate import Accelerator

warnings.simplefilter("ignore")  # of the libraries
torch.manual_seed(0)
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
assert accelerator.device.type == "npu"
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
x = torch.randn(32, 8)
loader = torch.utils.data.DataLoader(list(zip(x, x.sum(1, keepdim=True), strict=True)), batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _ in range(10):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
assert losses[-1] < 0.7 * losses[0], losses
