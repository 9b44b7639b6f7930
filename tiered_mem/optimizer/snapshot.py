"""Copies of what an optimizer keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from typing import Any

import torch


def on_cpu(value: Any, done: Collection[int] = ()) -> Any:
    """A copy of a value, in which all tensors are copies on the CPU. DTensors are DTensors.

    done: the ids of tensors that are such copies already.
    """
    return with_tensors(value, lambda each: each if id(each) in done else each.detach().to("cpu", copy=True))


def with_tensors(value: Any, replaced: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with other tensors. Its dictionaries, lists and tuples are copies."""
    if isinstance(value, torch.Tensor):
        return replaced(value)
    if isinstance(value, dict):
        new = copy(value)
        new.update((key, with_tensors(each, replaced)) for key, each in value.items())
        return new
    if type(value) in (list, tuple):
        return type(value)(with_tensors(each, replaced) for each in value)
    return value
