"""Work that fails on the device: who waits for what stood behind it gets an error, and does not wait for ever."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..manager import TieringManager
from ..policies import LayerOrderPolicy
from .bench import Bench
from .order import ARRIVED, RELEASED
from .outcome import Check, Outcome, not_applicable, passed

_ROWS, _WIDTH, _BEYOND = 64, 1 << 14, 1 << 20


def failure() -> list[Check]:
    """It spoils the process, in which nothing is to be checked afterwards."""
    return [Check("a failure ends in an error", _failure, (ARRIVED, RELEASED), "a cpu fails at once")]


def _failure(bench: Bench) -> Outcome:
    """An index that is out of range, in a layer whose activations leave."""
    device = bench.device
    weight = torch.zeros(_ROWS, _WIDTH, device=device.torch_device, requires_grad=True)
    wrong = torch.full((_ROWS,), _BEYOND, device=device.torch_device)
    layers = [_Cosine(), _Cosine()]
    told: list[str] = []
    manager = TieringManager(
        policy=LayerOrderPolicy(), device=str(device.torch_device), host_bytes="64MiB", preallocate=False
    )
    try:
        with manager.offload_context(layers, min_bytes=1):
            x = functional.embedding(wrong, weight)
            for layer in layers:
                x = layer(x)
        torch.autograd.backward(x.sum())
        device.synchronize()
    except RuntimeError as error:
        told.append(_first_line(error))
    try:
        manager.close()
    except RuntimeError as error:
        told.append(_first_line(error))
    if not told:
        return not_applicable("this device computes on with an index that is out of range, and tells of no error")
    return passed(f"the training ended with {told[0]!r}" + (", and so did close()" if len(told) > 1 else ""))


class _Cosine(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
