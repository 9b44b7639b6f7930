"""A small vision transformer and a small convolutional net."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CLASSES, CHANNELS, IMAGE, PATCH, WIDTH, HEADS = 10, 3, 16, 4, 32, 4


class ViT(nn.Module):
    """reentrant: how its blocks are checkpointed; None keeps all their activations."""

    def __init__(self, dropout: float = 0.0, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.patches = nn.Conv2d(CHANNELS, WIDTH, PATCH, stride=PATCH)
        self.class_token = nn.Parameter(torch.randn(1, 1, WIDTH) / 10)
        self.positions = nn.Parameter(torch.randn(1, (IMAGE // PATCH) ** 2 + 1, WIDTH) / 10)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 2 * WIDTH, dropout, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1)
        x = self.dropout(x + self.positions)
        for block in self.blocks:
            if self.reentrant is not None and self.training:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]).float(), targets)


class ConvNet(nn.Module):
    """No biases before batch norm: their gradients would be rounding errors, which Adam makes large steps of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(CHANNELS, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
            nn.Conv2d(16, 32, 1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 2 * 2, CLASSES),
        )

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy."""
        return F.cross_entropy(self.layers(images).float(), targets)
