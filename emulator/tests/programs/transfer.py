"""A program that was written for CUDA, by torch_npu's transfer_to_npu."""

import warnings

warnings.simplefilter("ignore")  # transfer_to_npu's, of what it replaces

import torch  # noqa: E402
from torch_npu.contrib import transfer_to_npu  # noqa: E402, F401

assert torch.cuda.is_available()
device = torch.device("cuda")
model = torch.nn.Linear(8, 1).cuda()
x = torch.randn(32, 8, device=device)
y = x.sum(1, keepdim=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
stream = torch.cuda.Stream()
losses = []
for _ in range(20):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
stream.wait_stream(torch.cuda.current_stream())
torch.cuda.synchronize()
assert losses[-1] < 0.5 * losses[0], losses
assert torch.cuda.max_memory_allocated() > 0
assert x.device.type == "npu"
