"""Steps of a library's model, the same for the same number."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from emulator.tests.library_models import LibraryModel


def trained(kind: LibraryModel, model: nn.Module, device: str, steps: int) -> list[Tensor]:
    """The losses of some steps. The gradients of the last one stay."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = kind.loss(model, lambda tensor: tensor.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses
