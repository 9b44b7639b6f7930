"""Whether an optimizer steps parameters together as it does one by one."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..wrappers import plain_tensors
from .leaves import leaf_at, leaves
from .partial_step import NeedsAll, Param, PartialStep, State, bare_step
from .random_numbers import RandomNumbers
from .sharding import gathered
from .snapshot import with_tensors
from .trial import Trial, gradient_for, params_of

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


def check_separable(optimizer: torch.optim.Optimizer, trial: Trial) -> None:
    """Raises NeedsAll if a step of the smallest parameters together is not the same as one after the other.

    What has been tried is not all that there is: see docs/optimizer.md.
    """
    pairs = _smallest(optimizer)
    if len(pairs) < 2:
        trial.copy(pairs)
        return
    with trial.undisturbed() as random:
        sparse = _takes_sparse_alone(trial, pairs)
        for number, scales in enumerate(_TRIALS):
            together, apart = trial.copy(pairs), trial.copy(pairs)
            if not _step_both(together, apart, scales, random, sparse=sparse, must=number == 0):
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
    random: RandomNumbers,
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
        random.restore()
        try:
            bare_step(together)()
        except Exception:
            if must:
                raise
            return False
        random.restore()
        partial = PartialStep(apart)
        for param in params_of(apart):
            states = {param: apart.state[param]} if param in apart.state else {}
            stepped = partial.step([param], states, ())
            # As tensors that have been away: they are others.
            apart.state.update(with_tensors(stepped, lambda each: each.detach().clone()))
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
