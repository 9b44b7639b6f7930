"""Which optimizers are stepped bucket by bucket, and which at once."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..device.device import Device
from ..ground.wrappers import copied, plain_tensors
from .bucket import Bucket
from .layout import Param, Splitter, State, gathered, leaf_at, leaves, with_tensors
from .partial_step import NeedsAll, PartialStep, bare_step
from .trial import OwnTensors, Trial, gradient_for, params_of

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
        self._known = self.closure_first = is_known(optimizer)
        self.in_order = not self._known
        self.look_at_groups()
        self.at_once = not (self._known and self._one_by_one) if separable is None else not separable
        self._taken: set[object] = set()
        self.split = OwnTensors(device, optimizer) if self.at_once and self.in_order else Splitter(device)
        self.trial = Trial(optimizer, self.split)
        if separable and not self._one_by_one:
            raise NeedsAll(optimizer, "a group has parameters on several devices or of several types")
        if separable and not self._known:
            check_separable(optimizer, self.trial)

    def look_at_groups(self) -> None:
        """One may have become such that its parameters are not stepped one by one."""
        self._one_by_one = not (self._known and is_mixed(self._optimizer))

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
        if type(self._optimizer) is not torch.optim.SGD:
            return False
        have = {
            param
            for bucket in buckets
            for param, state in bucket.states.items()
            if state.get("momentum_buffer") is not None
        }
        return any(
            group["momentum"]
            and group["foreach"] is not False
            and len({param in have for param in group["params"] if param.grad is not None}) > 1
            for group in self._optimizer.param_groups
        )


def is_known(optimizer: torch.optim.Optimizer) -> bool:
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


def is_mixed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a known optimizer has a group in which what becomes of a parameter depends on the others."""
    return any(_mixed(group, type(optimizer)) for group in optimizer.param_groups)


def _mixed(group: dict[str, Any], kind: type) -> bool:
    params = group["params"]
    if kind is torch.optim.Adafactor and group["eps"][0] is None:
        # The type of the first parameter is that of which all of them take an epsilon.
        return len({param.dtype for param in params}) > 1
    # It is for all together that torch chooses whether to use its kernels for lists, which may round otherwise.
    chosen = group.get("foreach") is not None or group.get("fused")
    return not chosen and len({(type(param), param.device.type) for param in params}) > 1


def check_separable(optimizer: torch.optim.Optimizer, trial: Trial) -> None:
    """Raises NeedsAll if a step of the smallest parameters together is not the same as one after the other.

    What has been tried is not all that there is: see docs/optimizer.md.
    """
    pairs = _smallest(optimizer)
    if len(pairs) < 2:
        trial.copy(pairs)
        return
    with trial.undisturbed() as restore:
        sparse = _takes_sparse_alone(trial, pairs)
        for number, scales in enumerate(_TRIALS):
            together, apart = trial.copy(pairs), trial.copy(pairs)
            if not _step_both(together, apart, scales, restore, sparse=sparse, must=number == 0):
                continue
            for one, other in zip(params_of(together), params_of(apart), strict=True):
                if not (_bits_equal(one, other) and _alike(together.state.get(one), apart.state.get(other))):
                    raise NeedsAll(
                        optimizer,
                        "parameters together and one by one come out differently, with gradients of "
                        f"{scales[0]} in the first step and {scales[1]} in the second",
                    )


def _smallest(optimizer: torch.optim.Optimizer) -> list[tuple[Param, State]]:
    """Up to three parameters: two of one group, and one of another, if there is any."""
    pairs = [
        (param, group)
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad and param.numel()
    ]
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


def _takes_sparse_alone(trial: Trial, pairs: list[tuple[Param, State]]) -> bool:
    copy = trial.copy(pairs[:1])
    (twin,) = params_of(copy)
    twin.grad = gradient_for(twin, 1)
    try:
        bare_step(copy)()
    except RuntimeError as error:
        if "sparse" in str(error).lower():
            return True
        raise
    return False


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
                gradient = None if scale is None else gradient_for(param, scale)
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
