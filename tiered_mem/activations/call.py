"""A call of a layer, and all that has to be as it was when the layer is computed again."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from ..device.torch_private import is_compiled, tree_unflatten
from ..errors import NotRepeatable
from ..policies.actions import How
from .operators import tensors_among


class Call:
    """A layer, what it is called with, and the versions of what must not change until it is computed again.

    Of weights it is the tensors themselves that count: FSDP2 puts others into their places after the forward. The
    checkpoint sees to the inputs from the forward's end on.

    begins: told when the layer is computed again. parts: the layer, and the modules inside of it. compiled: one of
        them is. A dispatch mode would make it run as it was written.
    """

    def __init__(
        self, begins: Callable[[], None], parts: Sequence[Module], leaves: Sequence[Any], structure: Any
    ) -> None:
        self._begins = begins
        self.module = parts[0]
        self.leaves = leaves
        self._structure = structure
        self._modes = [(each, each.training) for each in parts]
        self.compiled = any(map(is_compiled, parts))
        self._weights = [(each, _version(each)) for each in weights_of(parts)]
        self._buffers = [
            (each._buffers, name, tensor, _version(tensor))
            for each in parts
            for name, tensor in each._buffers.items()
            if tensor is not None
        ]
        self._inputs = [(each, _version(each)) for each in tensors_among(leaves)]
        self._settings = settings()

    def again(self, *leaves: Any) -> None:
        """Computes the layer again. Raises NotRepeatable where it would not begin as it did."""
        self._begins()
        if why := self._other_now():
            raise NotRepeatable(type(self.module).__name__, why)
        args, named = tree_unflatten(leaves, self._structure)
        self.module(*args, **named)

    def changed(self) -> str | None:
        """What the layer has changed that it would find changed. To be asked once, when it has ended."""
        inputs, self._inputs, self.leaves = self._inputs, [], ()
        if found := self._changed_state():
            return f"it changes its {found}"
        if any(_version(each) != version for each, version in inputs):
            return "it changes its input"
        return None

    def _changed_state(self) -> str | None:
        for owner, name, tensor, version in self._buffers:
            if owner.get(name) is not tensor or _version(tensor) != version:
                prefixes = (prefix for prefix, each in self.module.named_modules() if each._buffers is owner)
                prefix = next(prefixes, "")
                return f"buffer {prefix}.{name}" if prefix else f"buffer {name}"
        for weight, version in self._weights:
            if _version(weight) != version:
                names = (name for name, each in self.module.named_parameters() if each is weight)
                return f"weight {next(names, '')}".rstrip()
        return None

    def _other_now(self) -> str | None:
        if found := self._changed_state():
            return f"its {found} was changed between its forward and its backward"
        if any(each.training != training for each, training in self._modes):
            return "train() or eval() was called between its forward and its backward"
        if self._settings != settings():
            return "its backward runs under other settings of torch, such as sdpa_kernel() or set_default_dtype()"
        return None


class Kind(NamedTuple):
    """What has to be the same for what was seen of one call to hold for another."""

    how: How
    modules: tuple[object, ...]
    weights: tuple[object, ...]
    inputs: tuple[object, ...]
    autocast: tuple[object, ...]
    settings: tuple[object, ...]

    @classmethod
    def of(cls, how: How, parts: Sequence[Module], leaves: Iterable[object]) -> Kind:
        modules = tuple([(type(each), each.training) for each in parts])
        weights = tuple([(each.shape, each.dtype, each.requires_grad) for each in weights_of(parts)])
        inputs = tuple(map(_described, leaves))
        devices = {each.device.type for each in tensors_among(leaves)} | {"cpu"}
        autocast = tuple(
            (kind, torch.get_autocast_dtype(kind)) for kind in sorted(devices) if torch.is_autocast_enabled(kind)
        )
        return cls(how, modules, weights, inputs, autocast, settings())


def parts_of(layer: Module) -> list[Module]:
    """The layer and all modules inside of it, each once. In a third of the time of its own modules()."""
    found = {layer: None}
    left = [layer]
    while left:
        for each in left.pop()._modules.values():
            if each is not None and each not in found:
                found[each] = None
                left.append(each)
    return list(found)


def weights_of(parts: Iterable[Module]) -> list[torch.nn.Parameter]:
    """The parameters of these modules, as often as they have them."""
    return [weight for each in parts for weight in each._parameters.values() if weight is not None]


def host_random() -> object:
    """The states of Python's and numpy's random numbers, which nobody restores."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else repr(numpy.random.get_state())


def holds_more(argument: object) -> bool:
    """Whether an argument is an object with attributes that a layer may change, such as a cache."""
    return hasattr(argument, "__dict__") and not isinstance(argument, torch.Tensor | Module | type | Callable)


def contents(thing: object) -> list[object]:
    """What an object holds, in its attributes and what these hold in turn: tensors by identity, all else by value.

    Of very many things these are the first ones.
    """
    found: list[object] = []
    left, seen = [thing], set()
    while left and len(found) < _MOST_CONTENTS:
        each = left.pop()
        if isinstance(each, int | float | str | None):
            found.append(each)
        elif isinstance(each, torch.Tensor):
            found += (id(each), _version(each))
        elif id(each) not in seen:
            seen.add(id(each))
            inside = _inside(each)
            found += (id(each), len(inside))
            left += inside
    return found


# Each layer of a model may have its part in a cache.
_MOST_CONTENTS = 10_000


def _inside(thing: object) -> list[object]:
    if isinstance(thing, Mapping):
        return list(thing.values())
    if isinstance(thing, list | tuple):
        return list(thing)
    return list(vars(thing).values()) if holds_more(thing) else []


def settings() -> tuple[object, ...]:
    """What chooses among kernels, for this process: a layer may come to other bits where it differs."""
    return tuple([ask() for ask in _SETTINGS])


_SETTINGS: tuple[Callable[[], object], ...] = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch.are_deterministic_algorithms_enabled,
    torch.get_float32_matmul_precision,
    torch.get_default_dtype,
)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # which nobody counts there


def _described(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return type(leaf), leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
    return leaf if isinstance(leaf, int | float | str | None) else type(leaf)
