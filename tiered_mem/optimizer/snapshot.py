"""Copies of what an optimizer keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from typing import Any

import torch


def on_cpu(value: Any, done: Collection[int] = ()) -> Any:
    """A copy of a value, in which all tensors are copies on the CPU. DTensors are DTensors.

    What is one tensor in several places is so in the copy. done: the ids of tensors that are such copies already.
    """
    copies: dict[int, torch.Tensor] = {}

    def copied(each: torch.Tensor) -> torch.Tensor:
        if id(each) in done:
            return each
        if id(each) not in copies:
            copies[id(each)] = each.detach().to("cpu", copy=True)
        return copies[id(each)]

    return with_tensors(value, copied)


def with_tensors(value: Any, replaced: Callable[[Any], Any], kinds: tuple[type, ...] = (torch.Tensor,)) -> Any:
    """A value with other tensors. Its dictionaries, lists and tuples are copies.

    kinds: the types of what is replaced.
    """
    if isinstance(value, kinds):
        return replaced(value)
    if isinstance(value, dict):
        new = copy(value)
        new.update((key, with_tensors(each, replaced, kinds)) for key, each in value.items())
        return new
    if type(value) in (list, tuple):
        return type(value)(with_tensors(each, replaced, kinds) for each in value)
    return value
