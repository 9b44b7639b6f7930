"""The random numbers that are everybody's, and generators that are somebody's own."""

from __future__ import annotations

import random
import sys
from copy import deepcopy
from typing import Any

import torch

from ..device import Device


class RandomNumbers:
    """The state of the random numbers of torch, on the CPU and on a device, of Python and of numpy."""

    def __init__(self, device: Device) -> None:
        self._device = None if device.kind == "cpu" else device.torch_device
        self._cpu_state = torch.get_rng_state()
        self._python_state = random.getstate()
        self._numpy = _numpy_random()
        if self._numpy is not None:
            self._numpy_state = self._numpy.get_state()
        if self._device is not None:
            self._module: Any = torch.get_device_module(self._device)
            self._state = self._module.get_rng_state(self._device)

    def restore(self) -> None:
        """The next numbers are those that came after this was made."""
        torch.set_rng_state(self._cpu_state)
        random.setstate(self._python_state)
        if self._numpy is not None:
            self._numpy.set_state(self._numpy_state)
        if self._device is not None:
            self._module.set_rng_state(self._state, self._device)


def generator_types() -> tuple[type, ...]:
    """What draws random numbers and may belong to an optimizer."""
    module = _numpy_random()
    return (torch.Generator, random.Random, *(() if module is None else (module.Generator, module.RandomState)))


def copy_of_generator(generator: Any) -> Any:
    """Another generator, which draws the same numbers."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device).set_state(generator.get_state())
    return deepcopy(generator)


def _numpy_random() -> Any:
    # numpy itself imports it only for who uses it.
    return sys.modules.get("numpy.random")
