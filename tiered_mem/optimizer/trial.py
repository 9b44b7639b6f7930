"""Tries an optimizer out on copies of its parameters, to know its states before they exist."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Set
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from ..device.device import Device
from ..ground.wrappers import copied, plain_tensors
from .layout import Param, Pieces, Splitter, State, StateLayout, contents, layout_of, spread_of, with_tensors
from .partial_step import NeedsAll, bare_step

_log = logging.getLogger("tiered_mem.optimizer")

HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
# What a copy does not take over. A step of the object's own is a scheduler's.
_ITS_OWN = ("state", "param_groups", "step")
# Some optimizers make the last of their tensors in the second step.
_STEPS = 2


class Trial:
    """Steps copies of an optimizer with copies of its parameters. The optimizer itself sees nothing of it.

    A copy takes as much device memory as the parameter, its gradient and its state.

    Raises ValueError for an optimizer that cannot be stepped like this.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, split: Splitter) -> None:
        self._optimizer = optimizer
        self._split = split
        self._known: dict[object, StateLayout] = {}

    def layout_of(self, param: Param, group: State) -> StateLayout:
        """That of the state which the parameter has or will have. Empty where that cannot be found out."""
        state = self._optimizer.state.get(param)
        if not param.requires_grad or isinstance(state, dict):
            return layout_of(param, state if isinstance(state, dict) else {}, self._split)
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
            try:
                with self.undisturbed():
                    self._known[alike] = layout_of(param, self._tried(param, group), self._split)
            except ValueError as error:
                _log.debug("what states it makes is seen in the first step: %s", str(error))
                return StateLayout((), 0)
        return self._known[alike]

    def check_gradient(self, param: Param, group: State) -> None:
        """Raises what the optimizer does where it does not take gradients of such a layout.

        One element will do to find that out.
        """
        gradient = param.grad
        if gradient is None:
            return
        tiny = torch.zeros((1,) * param.ndim, dtype=param.dtype, device=param.device)
        copy = self.copy([(tiny, group)])
        (twin,) = params_of(copy)
        twin.grad = torch.zeros_like(tiny)
        if gradient.layout is not torch.strided:
            twin.grad = twin.grad.to_sparse(gradient.sparse_dim())
        with same_random_numbers(self._split.device):
            bare_step(copy)()

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
    def undisturbed(self) -> Iterator[Callable[[], None]]:
        """`same_random_numbers`, and errors say what was tried."""
        try:
            with same_random_numbers(self._split.device) as restore:
                yield restore
        except (NeedsAll, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ValueError(
                f"{type(self._optimizer).__name__} cannot be tiered bucket by bucket: a step with copies of some "
                f"of its parameters failed ({type(error).__name__}: {error})"
            ) from error

    def _tried(self, param: Param, group: State) -> State:
        try:
            return self._state_after(param, group, lambda twin: gradient_for(twin, 1))
        except RuntimeError as error:
            if "sparse" not in str(error).lower():
                raise
        # SparseAdam takes no other.
        return self._state_after(param, group, lambda twin: torch.zeros_like(twin).to_sparse())

    def _state_after(self, param: Param, group: State, gradient: Callable[[Param], torch.Tensor]) -> State:
        copy = self.copy([(param, group)])
        (twin,) = params_of(copy)
        for _ in range(_STEPS):
            twin.grad = gradient(twin)
            bare_step(copy)()
        state = copy.state.get(twin)
        return dict(state) if isinstance(state, dict) else {}


class OwnTensors(Splitter):
    """Moves only tensors whose memory nothing else refers to that the optimizer has.

    An optimizer may have a state that is a view of a larger tensor which it keeps elsewhere, or that is the
    parameter itself. It would go on with the other one, and not with what was moved and brought back.
    """

    changes = True

    def __init__(self, device: Device, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(device)
        self._optimizer = optimizer
        self._shared: Set[int] = frozenset()

    def look(self) -> None:
        """Finds out what is shared now."""
        grads = [param.grad for param in params_of(self._optimizer)]
        users = Counter(
            _storage(part)
            for value in contents([vars(self._optimizer), grads])
            if isinstance(value, torch.Tensor)
            for part in plain_tensors(value)
            if part.layout is torch.strided and part.nbytes
        )
        self._shared = {storage for storage, count in users.items() if count > 1}

    def __call__(self, value: object) -> Pieces | None:
        pieces = super().__call__(value)
        return pieces if pieces is not None and all(map(self._alone, pieces.tensors)) else None

    def _alone(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().nbytes() == tensor.nbytes and _storage(tensor) not in self._shared


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


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


def _cloned(value: Any) -> Any:
    numpy = _numpy_random()
    generators = (torch.Generator, random.Random, *(() if numpy is None else (numpy.Generator, numpy.RandomState)))

    def clone(each: Any) -> Any:
        if isinstance(each, torch.Tensor):
            return each if isinstance(each, torch.nn.Parameter) else copied(each)
        if isinstance(each, torch.Generator):
            return torch.Generator(each.device).set_state(each.get_state())
        return deepcopy(each)

    return with_tensors(value, clone, (torch.Tensor, *generators))


@contextlib.contextmanager
def same_random_numbers(device: Device) -> Iterator[Callable[[], None]]:
    """Afterwards the random numbers of torch, Python and numpy are as if none had been drawn.

    device: that of torch's, beside the CPU. Gives a function that makes them so in the middle, too.
    """
    restores: list[Callable[[], None]] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(random.setstate, random.getstate()),
    ]
    if (numpy := _numpy_random()) is not None:
        restores.append(partial(numpy.set_state, numpy.get_state()))
    if device.kind != "cpu":
        on_device: Any = torch.get_device_module(device.torch_device)
        state = on_device.get_rng_state(device.torch_device)
        restores.append(partial(on_device.set_rng_state, state, device.torch_device))

    def restore() -> None:
        for each in restores:
            each()

    try:
        yield restore
    finally:
        restore()


def _numpy_random() -> Any:
    # numpy itself imports it only for who uses it.
    return sys.modules.get("numpy.random")
