"""How full a device is all through a step of a training, as torch counts it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn


class MemoryOverTime:
    """Looks where modules begin and end, in forward and in backward, while it is open.

    Each look is at a time of the device, and tells the most that was allocated since the one before: torch's peak
    begins anew with it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._looks: list[tuple[Any, int]] = []
        self._parts: dict[str, int] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> MemoryOverTime:
        torch.npu.reset_peak_memory_stats()
        for module in self._model.modules():
            self._handles.append(module.register_forward_pre_hook(lambda *_: self._look()))
            self._handles.append(module.register_forward_hook(self._after_forward))
        self._look()
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def part(self, name: str) -> None:
        """A part of the step begins."""
        self._look()
        self._parts[name] = len(self._looks) - 1

    def found(self) -> dict[str, Any]:
        """Looks for the last time.

        times: of the looks, in seconds from the first one on. bytes: the most between each two. parts: the time at
            which each begins.
        """
        self._look()
        torch.npu.synchronize()
        begin = self._looks[0][0]
        times = [begin.elapsed_time(event) / 1e3 for event, _ in self._looks]
        assert all(before <= after for before, after in pairwise(times))
        parts = {name: times[at] for name, at in self._parts.items()}
        return {"times": times, "bytes": [most for _, most in self._looks[1:]], "parts": parts}

    def _look(self) -> None:
        event = torch.npu.Event(enable_timing=True)
        event.record()
        self._looks.append((event, torch.npu.max_memory_allocated()))
        torch.npu.reset_peak_memory_stats()

    def _after_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        self._look()
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _: self._look())
