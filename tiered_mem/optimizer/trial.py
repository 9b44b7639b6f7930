"""Tries an optimizer out on copies of its parameters, to know its states before they exist."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from ..device import Device
from ..parts import plain_tensors
from .layout import Layout, layout_of
from .partial_step import NeedsAll, Param, PartialStep, State
from .sharding import gathered, spread_of
from .snapshot import with_tensors

# Some optimizers make the last of their tensors in the second step.
_STEPS = 2


class Trial:
    """Steps copies of an optimizer with copies of its parameters. The optimizer itself sees nothing of it.

    A copy takes as much device memory as the parameter, its gradient and its state.

    Raises ValueError for an optimizer that cannot be stepped like this.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: Device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._known: dict[object, Layout] = {}

    def layout_of(self, param: Param, group: State) -> Layout:
        """That of the state which the parameter will have."""
        alike = (
            id(group),
            type(param),
            param.dtype,
            param.device,
            param.shape,
            param.stride() if param.layout is torch.strided else None,
            spread_of(param),  # and not what this process has of it: all make the same trials
        )
        if alike not in self._known:
            with self._undisturbed():
                self._known[alike] = layout_of(param, self._tried(param, group), self._device)
        return self._known[alike]

    def check_separable(self) -> None:
        """Raises NeedsAll if a step of two parameters together is not the same as one after the other."""
        pairs = [
            (param, group)
            for group in self._optimizer.param_groups
            for param in group["params"]
            if param.requires_grad and param.numel()
        ]
        pairs = sorted(pairs, key=lambda pair: pair[0].numel())[:2]
        if len(pairs) < 2:
            return
        with self._undisturbed() as random:
            together, apart = self._copy(pairs), self._copy(pairs)
            for number in range(_STEPS):
                for copy in (together, apart):
                    for index, param in enumerate(_params(copy)):
                        param.grad = _gradient(param, 1 + index + number)
                random.restore()
                together.step()
                random.restore()
                step = PartialStep(apart)
                for param in _params(apart):
                    states = {param: apart.state[param]} if param in apart.state else {}
                    apart.state.update(step.step([param], states, ()))
            for one, other in zip(_params(together), _params(apart), strict=True):
                # As a whole, for all processes are to find the same.
                if not _bits_equal(gathered(one.detach()), gathered(other.detach())):
                    raise NeedsAll(self._optimizer, "two parameters together and one by one come out differently")

    def _tried(self, param: Param, group: State) -> State:
        copy = self._copy([(param, group)])
        (twin,) = _params(copy)
        try:
            for _ in range(_STEPS):
                twin.grad = _gradient(twin, 1)
                copy.step()
        except RuntimeError as error:
            if "sparse" not in str(error).lower():
                raise
            # SparseAdam takes no other.
            copy = self._copy([(param, group)])
            (twin,) = _params(copy)
            for _ in range(_STEPS):
                twin.grad = torch.zeros_like(twin).to_sparse()
                copy.step()
        return dict(copy.state[twin]) if twin in copy.state else {}

    def _copy(self, pairs: list[tuple[Param, State]]) -> torch.optim.Optimizer:
        """An optimizer of the same kind, with the same options and copies of these parameters in their groups."""
        copy: torch.optim.Optimizer = object.__new__(type(self._optimizer))
        others = {name: value for name, value in vars(self._optimizer).items() if name not in _ITS_OWN}
        vars(copy).update(with_tensors(others, _clone))
        kept = {key: value for key, value in self._optimizer.state.items() if not isinstance(key, torch.Tensor)}
        copy.state = defaultdict(dict, with_tensors(kept, _clone))
        for name in _HOOKS:
            setattr(copy, name, OrderedDict())
        groups: dict[int, State] = {}
        for param, group in pairs:
            mine = groups.setdefault(id(group), {**group, "params": []})
            twin = torch.nn.Parameter(torch.zeros_like(param.detach()), requires_grad=True)
            # But for what a wrapper has there itself, such as its parts.
            vars(twin).update((name, value) for name, value in vars(param).items() if name not in vars(twin))
            mine["params"].append(twin)
        copy.param_groups = list(groups.values())
        return copy

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[_Random]:
        """Random numbers are afterwards as if none had been drawn; errors say what was tried."""
        random = _Random(self._device)
        try:
            yield random
        except (NeedsAll, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ValueError(
                f"{type(self._optimizer).__name__} cannot be tiered: a step with a copy of one or two of its "
                f"parameters failed ({type(error).__name__}: {error}). Leave it as it is"
            ) from error
        finally:
            random.restore()


class _Random:
    """The state of torch's random numbers, on the CPU and on a device."""

    def __init__(self, device: Device) -> None:
        self._device = None if device.kind == "cpu" else device.torch_device
        self._cpu_state = torch.get_rng_state()
        if self._device is not None:
            self._module: Any = torch.get_device_module(self._device)
            self._state = self._module.get_rng_state(self._device)

    def restore(self) -> None:
        torch.set_rng_state(self._cpu_state)
        if self._device is not None:
            self._module.set_rng_state(self._state, self._device)


# What a copy does not take over. A step of the object's own is a scheduler's.
_ITS_OWN = ("state", "param_groups", "step")
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, torch.nn.Parameter) else tensor.detach().clone()


def _params(optimizer: torch.optim.Optimizer) -> list[Param]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _gradient(param: Param, number: int) -> torch.Tensor:
    """One that differs from element to element, without a draw of random numbers."""
    gradient = torch.zeros_like(param.detach())
    for part in plain_tensors(gradient):
        part.copy_(torch.linspace(-1, number, part.numel()).view(part.shape))
    return gradient


def _bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    pairs = zip(plain_tensors(one), plain_tensors(other), strict=True)
    # NaN is as good as any other value here.
    return all(torch.allclose(first, second, rtol=0, atol=0, equal_nan=True) for first, second in pairs)
