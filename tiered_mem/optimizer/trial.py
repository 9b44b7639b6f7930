"""Tries an optimizer out on copies of its parameters, to know its states before they exist."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from ..wrappers import plain_tensors
from .known import HOOKS
from .layout import Layout, Movable, layout_of
from .leaves import contents
from .partial_step import NeedsAll, Param, State, bare_step
from .random_numbers import RandomNumbers, copy_of_generator, generator_types
from .sharding import spread_of
from .snapshot import with_tensors

# Some optimizers make the last of their tensors in the second step.
_STEPS = 2


class Trial:
    """Steps copies of an optimizer with copies of its parameters. The optimizer itself sees nothing of it.

    A copy takes as much device memory as the parameter, its gradient and its state.

    Raises ValueError for an optimizer that cannot be stepped like this.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, movable: Movable) -> None:
        self._optimizer = optimizer
        self._movable = movable
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
            with self.undisturbed():
                self._known[alike] = layout_of(param, self._tried(param, group), self._movable)
        return self._known[alike]

    def check_gradient(self, param: Param, group: State) -> None:
        """Raises what the optimizer does where it does not take gradients of such a layout.

        One element will do to find that out.
        """
        gradient = param.grad
        if gradient is None:
            return
        random = RandomNumbers(self._movable.device)
        tiny = torch.zeros((1,) * param.ndim, dtype=param.dtype, device=param.device)
        copy = self.copy([(tiny, group)])
        (twin,) = params_of(copy)
        twin.grad = torch.zeros_like(tiny)
        if gradient.layout is not torch.strided:
            twin.grad = twin.grad.to_sparse(gradient.sparse_dim())
        try:
            bare_step(copy)()
        finally:
            random.restore()

    def copy(self, pairs: list[tuple[Param, State]]) -> torch.optim.Optimizer:
        """An optimizer of the same kind, with the same options and copies of these parameters in their groups.

        The copies are zeros. They come in the order of the groups, as `params_of` has them.

        Raises NeedsAll where the optimizer keeps parameters elsewhere, too: a copy would change those.
        """
        others = {name: value for name, value in vars(self._optimizer).items() if name not in _ITS_OWN}
        for name, value in others.items():
            if any(isinstance(each, torch.nn.Parameter) for each in contents(value)):
                raise NeedsAll(self._optimizer, f"it keeps parameters in {name!r}, beside its groups")
        copy: torch.optim.Optimizer = object.__new__(type(self._optimizer))
        vars(copy).update(_cloned(others))
        kept = {key: value for key, value in self._optimizer.state.items() if not isinstance(key, torch.Tensor)}
        copy.state = defaultdict(dict, _cloned(kept))
        for name in HOOKS:
            setattr(copy, name, OrderedDict())
        groups: dict[int, State] = {}
        for param, group in pairs:
            if id(group) not in groups:
                options = {key: value for key, value in group.items() if key != "params"}
                groups[id(group)] = {**_cloned(options), "params": []}
            twin = torch.nn.Parameter(torch.zeros_like(param.detach()), requires_grad=True)
            # But for what a wrapper has there itself, such as its parts.
            vars(twin).update((name, value) for name, value in vars(param).items() if name not in vars(twin))
            groups[id(group)]["params"].append(twin)
        copy.param_groups = list(groups.values())
        return copy

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[RandomNumbers]:
        """Random numbers are afterwards as if none had been drawn; errors say what was tried."""
        random = RandomNumbers(self._movable.device)
        try:
            yield random
        except (NeedsAll, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ValueError(
                f"{type(self._optimizer).__name__} cannot be tiered bucket by bucket: a step with copies of some "
                f"of its parameters failed ({type(error).__name__}: {error})"
            ) from error
        finally:
            random.restore()

    def _tried(self, param: Param, group: State) -> State:
        copy = self.copy([(param, group)])
        (twin,) = params_of(copy)
        try:
            for _ in range(_STEPS):
                twin.grad = gradient_for(twin, 1)
                bare_step(copy)()
        except RuntimeError as error:
            if "sparse" not in str(error).lower():
                raise
            # SparseAdam takes no other.
            copy = self.copy([(param, group)])
            (twin,) = params_of(copy)
            for _ in range(_STEPS):
                twin.grad = torch.zeros_like(twin).to_sparse()
                bare_step(copy)()
        state = copy.state.get(twin)
        return dict(state) if isinstance(state, dict) else {}


def params_of(optimizer: torch.optim.Optimizer) -> list[Param]:
    """All parameters, in the order of their groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def gradient_for(param: Param, scale: float) -> torch.Tensor:
    """One that differs from element to element, without a draw of random numbers.

    scale: how large it is. One that is not finite is the first element alone.
    """
    gradient = torch.zeros_like(param.detach())
    finite = scale - scale == 0
    for part in plain_tensors(gradient):
        part.copy_(torch.linspace(-0.7, 1, part.numel()).mul_(scale if finite else 1).view(part.shape))
        if not finite and part.numel():
            part[(0,) * part.ndim] = scale
    return gradient


# What a copy does not take over. A step of the object's own is a scheduler's.
_ITS_OWN = ("state", "param_groups", "step")


def _cloned(value: Any) -> Any:
    def clone(each: Any) -> Any:
        if isinstance(each, torch.Tensor):
            return each if isinstance(each, torch.nn.Parameter) else each.detach().clone()
        return copy_of_generator(each)

    return with_tensors(value, clone, (torch.Tensor, *generator_types()))
