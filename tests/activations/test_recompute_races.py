"""Copies of what a trial keeps, and layers that change it meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.activations.recomputing import HOWS, Of, gradients, plain, same, tiering
from tests.conftest import Link
from tiered_mem.policies import LayerBegin, Offload, Policy, Recompute, Saved


class OffloadsAtOnce(Policy):
    """Has all layers computed again, and whatever is saved goes to the host in the middle of its layer."""

    gather_bytes = 1

    def __init__(self, how: Any) -> None:
        self._how = how

    def decide(self, event: Any) -> Sequence[Any]:
        if isinstance(event, LayerBegin) and not event.backward:
            return [Recompute(event.layer, self._how)]
        if isinstance(event, Saved):
            return [Offload(key) for key, _ in event.blocks]
        return []


class Changes(nn.Module):
    """Changes its input: all of it, or a part of it by a view."""

    def __init__(self, part: slice) -> None:
        super().__init__()
        self.inner, self._part = nn.Linear(64, 64), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x * 2)
        with torch.no_grad():
            x[self._part].mul_(1.125)
        return y.sin() + 1


@pytest.mark.parametrize("part", [slice(None), slice(1, 3)], ids=["all", "part"])
@pytest.mark.parametrize("how", HOWS)
def test_a_layer_changes_its_input_when_the_copy_has_ended(how: Any, part: slice, device: str, link: Link) -> None:
    """Nobody reads that copy, as the layer is excluded. It still has to read what was there."""
    model = Of(lambda: Changes(part), layers=2).to(device)
    x = torch.randn(64, 64).to(device)
    right = plain(model, x.clone())
    link("10MB/s")
    with tiering(device, OffloadsAtOnce(how)) as manager:
        context = manager.offload_context(model.layers, min_bytes=1)
        for _ in range(3):
            assert same(gradients(model, x.clone(), lambda: context), right)
