"""The most device memory that something takes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def peak_of(run: Callable[[], T], device: str) -> tuple[T, int]:
    """What it returns, and the most bytes that tensors have taken meanwhile, beyond those before. 0 on the cpu."""
    if device == "cpu":
        return run(), 0
    gc.collect()
    memory = torch.get_device_module(device)
    before = memory.memory_allocated()
    memory.reset_peak_memory_stats()
    result = run()
    return result, int(memory.max_memory_allocated()) - before
