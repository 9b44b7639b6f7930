"""torch's checkpoint as the benchmarks put it around layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.checkpointing import Kept, checkpointed, same_numbers

pytestmark = pytest.mark.once(why="it needs no device")


class Counted(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        self.times[name] = self.times.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4, bias=False), nn.GELU(), nn.Linear(4, 4, bias=False)) for _ in range(3)]


def gradients(
    layers: Sequence[nn.Module], treated: Sequence[nn.Module], kept: Kept
) -> tuple[list[Tensor], dict[str, int]]:
    """And how often each operator ran."""
    with Counted() as counted:
        with checkpointed(treated, kept):
            loss = nn.Sequential(*layers)(torch.arange(8.0).view(2, 4)).sum()
        loss.backward()
    weights = [weight for layer in layers for weight in layer.parameters()]
    found = [weight.grad for weight in weights if weight.grad is not None]
    for weight in weights:
        weight.grad = None
    return found, counted.times


@pytest.mark.parametrize("kept", ["full", "selective"])
def test_the_layers_that_are_named_are_computed_again(layers: list[nn.Module], kept: Kept) -> None:
    plain, before = gradients(layers, [], kept)
    for k in range(1, 4):
        again, times = gradients(layers, layers[:k], kept)
        assert all(map(torch.equal, plain, again))
        assert len(plain) == len(again) == 6
        assert times["gelu"] == before["gelu"] + k
        # Backward needs the result of the first product of each layer, and stops before the second.
        assert times["mm"] == before["mm"] + (k if kept == "full" else 0)


def test_the_layers_are_as_they_were(layers: list[nn.Module]) -> None:
    attributes = [set(vars(layer)) for layer in layers]
    with pytest.raises(ZeroDivisionError), checkpointed(layers, "full"):
        raise ZeroDivisionError
    assert [set(vars(layer)) for layer in layers] == attributes


def test_batch_norm_would_not_give_the_same_numbers(layers: list[nn.Module]) -> None:
    assert same_numbers(layers)
    assert not same_numbers([*layers, nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))])
