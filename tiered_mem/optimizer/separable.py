"""Whether an optimizer may be stepped bucket by bucket: what is known of it, and trials with copies.

A trial also tells what states the optimizer will have.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch

from ..device.device import Device
from ..device.torch_private import OPTIMIZER_HOOKS
from ..ground.wrappers import copied, plain_tensors
from .bucket import Bucket
from .layout import (
    OwnTensors,
    Param,
    Splitter,
    State,
    StateLayout,
    contents,
    gathered,
    layout_of,
    leaf_at,
    leaves,
    lies_in,
    params_of,
    spread_of,
    with_tensors,
)
from .partial_step import NeedsAll, PartialStep, bare_step
from .random_numbers import RandomNumbers, generators, has_generator, same_random_numbers

_log = logging.getLogger("tiered_mem.optimizer")

# What a copy does not take over. A step of the object's own is a scheduler's.
_ITS_OWN = ("state", "param_groups", "step")
# Some optimizers make the last of their tensors in the second step.
_STEPS = 2
# Each of them calls a closure once, before all else. LBFGS is the one that does not step parameters by themselves.
_KNOWN = frozenset(
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and f"{kind.__module__}.".startswith("torch.optim.")
    and kind not in (torch.optim.Optimizer, torch.optim.LBFGS)
)
_INF, _NAN = math.inf, math.nan
# Trials, each of two steps: how large the gradients of three parameters are, which have none for a None. An
# optimizer that clips by what all have together, or leaves a step out for one of them, shows it in one of these.
_TRIALS: tuple[tuple[tuple[float | None, ...], ...], ...] = (
    ((1, 2, 3), (2, 3, 1)),
    *(((size, size, 2 * size), (size, 2 * size, size)) for size in (1e-8, 1e-4, 1e4, 1e8)),
    ((1e-8, 1e8, 1), (1e8, 1e-8, 1)),
    ((0, 0, 0), (1, 0, 0)),
    ((1, None, 1), (None, 1, None)),
    ((1, _INF, 1), (1, 1, 1)),
    ((_NAN, 1, 1), (1, 1, 1)),
    ((1, 1, 1), (1, 1, -_INF)),
)


class StepChoice:
    """What is known of an optimizer, and how its next step is to be made.

    separable: as in `TieringManager.register_optimizer`. at_once: each step is made at once. in_order: where steps
    are not, parameters have to be stepped in the order of the groups. closure_first: a step calls a closure once,
    before all else. split: for the states of this optimizer. trial: tries it out.

    Raises NeedsAll where the user's word is not true, as far as that can be found out.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: Device, separable: bool | None) -> None:
        self._optimizer = optimizer
        self._known = self.closure_first = _is_known(optimizer)
        self.in_order = not self._known
        self.look_at_groups()
        self.at_once = not (self._known and self._one_by_one) if separable is None else not separable
        self._taken: set[object] = set()
        self.split = OwnTensors(device, optimizer) if self.at_once and self.in_order else Splitter(device)
        self.trial = Trial(optimizer, self.split)
        if separable and not self._one_by_one:
            raise NeedsAll(optimizer, "a group has parameters on several devices or of several types")
        if separable and not self._known:
            self.trial.check_separable()

    def check_any_order(self, overlap: str) -> None:
        """Raises ValueError where buckets cannot be stepped in whatever order they come."""
        name = type(self._optimizer).__name__
        if self.at_once:
            raise ValueError(
                f"{name} is stepped at once, and overlap={overlap!r} is for what is stepped bucket by bucket: "
                "separable=True says that it steps each parameter by itself"
            )
        if not self._known and self.trial.draws is None:
            raise ValueError(
                f"whether {name} draws random numbers, in the order of its parameters, cannot be tried before it "
                f"has one with elements, and with overlap={overlap!r} they are stepped in another order: register "
                "it with its parameters, or leave overlap out"
            )
        if not self._known and self.trial.draws:
            raise ValueError(
                f"{name} draws random numbers, in the order of its parameters, and with overlap={overlap!r} they "
                "are stepped in another one: leave overlap out"
            )

    def look_at_groups(self) -> None:
        """One may have become such that its parameters are not stepped one by one."""
        kind = type(self._optimizer)
        self._one_by_one = not (self._known and any(_is_mixed(each, kind) for each in self._optimizer.param_groups))

    def at_once_now(self, buckets: Sequence[Bucket]) -> bool:
        """Whether the next step is to be made at once."""
        if self.at_once or not self._one_by_one:
            return True
        params = params_of(self._optimizer)
        here = set(map(id, params))
        if len(here) < len(params):
            return True  # one of them is stepped twice
        if self._known:
            return self._some_begin(buckets)
        # Somebody has put a parameter between others, which it may draw random numbers before.
        order = [id(param) for bucket in buckets for param in bucket.params if id(param) in here]
        return order != list(map(id, params))

    def early_now(self, buckets: Sequence[Bucket]) -> bool:
        """Whether parameters may be stepped before it is known which others have a gradient in this step."""
        known = {param for bucket in buckets for param in bucket.params}
        if not known.issuperset(params_of(self._optimizer)):
            return False  # step() takes new ones over first
        return not self.at_once_now(buckets) and not self._may_begin(buckets)

    def check_gradients(self) -> None:
        """Raises what the optimizer does for gradients that it does not take, before anything is changed."""
        takes_sparse_alone = type(self._optimizer) is torch.optim.SparseAdam
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None or (param.grad.layout is torch.strided) is not takes_sparse_alone:
                    continue
                kind = (id(group), param.dtype, param.grad.layout)
                if kind not in self._taken:
                    self.trial.check_gradient(param, group)
                    self._taken.add(kind)

    def _some_begin(self, buckets: Sequence[Bucket]) -> bool:
        """Whether SGD does without its kernels for lists, because some of a group have no momentum yet."""
        return any(
            len({param in have for param in group["params"] if param.grad is not None}) > 1
            for group, have in self._with_momentum(buckets)
        )

    def _may_begin(self, buckets: Sequence[Bucket]) -> bool:
        """Whether that may be, whatever gradients come."""
        return any(
            not have.issuperset(param for param in group["params"] if param.requires_grad)
            for group, have in self._with_momentum(buckets)
        )

    def _with_momentum(self, buckets: Sequence[Bucket]) -> list[tuple[State, set[Param]]]:
        """The groups of SGD that it has kernels for lists for, each with the parameters that have a momentum."""
        if type(self._optimizer) is not torch.optim.SGD:
            return []
        have = {
            param
            for bucket in buckets
            for param, state in bucket.states.items()
            if state.get("momentum_buffer") is not None
        }
        groups = self._optimizer.param_groups
        return [(group, have) for group in groups if group["momentum"] and group["foreach"] is not False]


class Trial:
    """Steps copies of an optimizer with copies of its parameters. The optimizer itself sees nothing of it.

    A copy takes as much device memory as the parameter, its gradient and its state.

    draws: whether `check_separable` has seen it draw random numbers; None where nothing was tried.

    Raises ValueError for an optimizer that cannot be stepped like this.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, split: Splitter) -> None:
        self._optimizer = optimizer
        self._split = split
        self._known: dict[object, StateLayout] = {}
        self.draws: bool | None = None

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
                with self._undisturbed():
                    _, state = self._tried(param, group)
                    self._known[alike] = layout_of(param, state, self._split)
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
        copy = self._copy([(tiny, group)])
        (twin,) = params_of(copy)
        twin.grad = torch.zeros_like(tiny)
        if gradient.layout is not torch.strided:
            twin.grad = twin.grad.to_sparse(gradient.sparse_dim())
        # Adagrad makes its states when it is made, before torch 2.12, and nothing is learnt of a copy without them.
        with same_random_numbers(self._split.device), contextlib.suppress(KeyError):
            bare_step(copy)()

    def check_separable(self) -> None:
        """Raises NeedsAll if a step of the smallest parameters together is not the same as one after the other.

        What has been tried is not all that there is: see docs/optimizer.md.
        """
        pairs = _smallest(self._optimizer)
        if not pairs:
            self._copy(pairs)
            return
        with self._undisturbed() as numbers:
            restore = numbers.restore
            sparse, _ = self._tried(*pairs[0])
            for number, scales in enumerate(_TRIALS):
                together, apart = self._copy(pairs), self._copy(pairs)
                if not _step_both(together, apart, scales, restore, sparse=sparse, must=number == 0):
                    continue
                for one, other in zip(params_of(together), params_of(apart), strict=True):
                    if not (_bits_equal(one, other) and _alike(together.state.get(one), apart.state.get(other))):
                        raise NeedsAll(
                            self._optimizer,
                            "parameters together and one by one come out differently, with gradients of "
                            f"{scales[0]} in the first step and {scales[1]} in the second",
                        )
            self.draws = numbers.drawn or has_generator(self._optimizer)

    def _copy(self, pairs: list[tuple[Param, State]]) -> torch.optim.Optimizer:
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
        for name in OPTIMIZER_HOOKS:
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
    def _undisturbed(self) -> Iterator[RandomNumbers]:
        """`same_random_numbers`, and errors say what was tried."""
        try:
            with same_random_numbers(self._split.device) as numbers:
                yield numbers
        except (NeedsAll, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ValueError(
                f"{type(self._optimizer).__name__} cannot be tiered bucket by bucket: a step with copies of some "
                f"of its parameters failed ({type(error).__name__}: {error})"
            ) from error

    def _tried(self, param: Param, group: State) -> tuple[bool, State]:
        """Whether the optimizer takes sparse gradients alone, and the state that it makes."""
        try:
            return False, self._state_after(param, group, lambda twin: _gradient_for(twin, 1))
        except RuntimeError as error:
            if "sparse" not in str(error).lower():
                raise
        return True, self._state_after(param, group, lambda twin: torch.zeros_like(twin).to_sparse())

    def _state_after(self, param: Param, group: State, gradient: Callable[[Param], torch.Tensor]) -> State:
        copy = self._copy([(param, group)])
        (twin,) = params_of(copy)
        for _ in range(_STEPS):
            twin.grad = gradient(twin)
            bare_step(copy)()
        state = copy.state.get(twin)
        if not isinstance(state, dict):
            return {}
        return dict(with_tensors(state, lambda tensor: None if lies_in(tensor, twin) else tensor))


def _gradient_for(param: Param, scale: float) -> torch.Tensor:
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
    def clone(each: Any) -> Any:
        if isinstance(each, torch.Tensor):
            return each if isinstance(each, torch.nn.Parameter) else copied(each)
        if isinstance(each, torch.Generator):
            return torch.Generator(each.device).set_state(each.get_state())
        return deepcopy(each)

    return with_tensors(value, clone, (torch.Tensor, *generators()))


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is one of torch's own that steps each parameter by itself, unless a group is mixed.

    A class derived from it may do anything, and so may a step that somebody put in its place. A scheduler's, which
    only takes note of the call, is none of these.
    """
    step = inspect.unwrap(type(optimizer).step)
    own = vars(optimizer).get("step")
    return (
        type(optimizer) in _KNOWN
        and step.__module__.startswith("torch.optim.")
        and (own is None or inspect.unwrap(own) is step)
    )


def _is_mixed(group: State, kind: type) -> bool:
    """Whether what becomes of a parameter in this group of a known optimizer depends on the others."""
    params = group["params"]
    if kind is torch.optim.Adafactor and group["eps"][0] is None:
        # The type of the first parameter is that of which all of them take an epsilon.
        return len({param.dtype for param in params}) > 1
    # It is for all together that torch chooses whether to use its kernels for lists, which may round otherwise.
    chosen = group.get("foreach") is not None or group.get("fused")
    return not chosen and len({(type(param), param.device.type) for param in params}) > 1


def _smallest(optimizer: torch.optim.Optimizer) -> list[tuple[Param, State]]:
    """Up to three parameters: two of one group, and one of another, if there is any.

    Frozen ones are taken only where there are no others.
    """
    all_pairs = [(param, group) for group in optimizer.param_groups for param in group["params"] if param.numel()]
    pairs = [(param, group) for param, group in all_pairs if param.requires_grad]
    pairs = pairs or [(param, group) for param, group in all_pairs if param.is_floating_point()]
    ordered = sorted(range(len(pairs)), key=lambda index: pairs[index][0].numel())
    chosen = ordered[:2]

    def in_one_group(one: int, other: int) -> bool:
        return pairs[one][1] is pairs[other][1]

    for wanted in (True, False):
        if len(chosen) == 2 and in_one_group(*chosen) is not wanted:
            others = [index for index in ordered[2:] if in_one_group(index, chosen[0]) is wanted]
            chosen += others[:1]
    # In the order of the groups, in which the optimizer comes to them.
    return [pairs[index] for index in sorted(chosen)]


def _step_both(
    together: torch.optim.Optimizer,
    apart: torch.optim.Optimizer,
    scales: tuple[tuple[float | None, ...], ...],
    restore: Callable[[], None],
    *,
    sparse: bool,
    must: bool,
) -> bool:
    """Steps the one as a whole, and the other parameter by parameter. False where it refuses such gradients."""
    for step in scales:
        for copy in (together, apart):
            for param, scale in zip(params_of(copy), step, strict=False):
                gradient = None if scale is None else _gradient_for(param, scale)
                param.grad = gradient.to_sparse() if sparse and gradient is not None else gradient
        restore()
        try:
            bare_step(together)()
        except Exception:
            if must:
                raise
            return False
        restore()
        partial = PartialStep(apart)
        for param in params_of(apart):
            states = {param: apart.state[param]} if param in apart.state else {}
            stepped = partial.step([param], states, ())
            # As tensors that have been away: they are others.
            apart.state.update(with_tensors(stepped, copied))
    return True


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return (one or None) is None and (other or None) is None
    found = dict(leaves(one))
    return found.keys() == dict(leaves(other)).keys() and all(
        _same(value, leaf_at(other, path)) for path, value in found.items()
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _bits_equal(one, other)
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (one != one and other != other)
    return type(one) is type(other) and (not isinstance(one, int | str | bool) or one == other)


def _bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    # As a whole, for all processes are to find the same.
    whole, another = gathered(one.detach()), gathered(other.detach())
    if whole.shape != another.shape or whole.dtype != another.dtype:
        return False
    if whole.layout is not torch.strided:
        whole, another = whole.to_dense(), another.to_dense()
    pairs = zip(plain_tensors(whole), plain_tensors(another), strict=True)
    # NaN is as good as any other value here.
    return all(torch.allclose(first, second, rtol=0, atol=0, equal_nan=True) for first, second in pairs)
