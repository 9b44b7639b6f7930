"""A convolutional net in channels_last, which torch_npu does not take: it says so, and the plain format trains."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](self.first(x)).relu()
        return (x + self.norms[1](self.second(y))).relu()


torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3), Block(16), Block(16)).npu()
images = torch.randn(2, 3, 16, 16).npu()
try:
    model = model.to(memory_format=torch.channels_last)
    model(images.to(memory_format=torch.channels_last)).square().mean().backward()
    print("runs")
except Exception as error:
    print("refused:", type(error).__name__, str(error).splitlines()[0])
