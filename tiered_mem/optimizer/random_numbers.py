"""Random numbers that are drawn as if somebody else had drawn none."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ..device.device import Device
from .layout import contents


class RandomNumbers:
    """The states of what draws random numbers for all. drawn: whether one was found to have been drawn."""

    def __init__(self, device: Device) -> None:
        ways: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
            (torch.get_rng_state, torch.set_rng_state),
            (random.getstate, random.setstate),
        ]
        if (numpy := _numpy_random()) is not None:
            ways.append((numpy.get_state, numpy.set_state))
        if device.kind != "cpu":
            on_device: Any = torch.get_device_module(device.torch_device)
            where = device.torch_device
            ways.append((partial(on_device.get_rng_state, where), partial(on_device.set_rng_state, device=where)))
        self._ways = [(get, put, get()) for get, put in ways]
        self.drawn = False

    def restore(self) -> None:
        """As they were."""
        for get, put, state in self._ways:
            self.drawn = self.drawn or _as_bytes(get()) != _as_bytes(state)
            put(state)


@contextlib.contextmanager
def same_random_numbers(device: Device) -> Iterator[RandomNumbers]:
    """Afterwards the random numbers of torch, Python and numpy are as if none had been drawn.

    device: that of torch's, beside the CPU. Gives what makes them so in the middle, too.
    """
    numbers = RandomNumbers(device)
    try:
        yield numbers
    finally:
        numbers.restore()


def _as_bytes(state: Any) -> bytes:
    # A tensor's pickle has its address.
    return bytes(state.cpu().numpy()) if isinstance(state, torch.Tensor) else pickle.dumps(state)


def has_generator(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it draws random numbers of its own."""
    kinds = generators()
    return any(isinstance(each, kinds) for value in vars(optimizer).values() for each in contents(value))


def generators() -> tuple[type, ...]:
    numpy = _numpy_random()
    return (torch.Generator, random.Random, *(() if numpy is None else (numpy.Generator, numpy.RandomState)))


def _numpy_random() -> Any:
    # numpy itself imports it only for who uses it.
    return sys.modules.get("numpy.random")
