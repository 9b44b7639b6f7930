"""Whether an optimizer is stepped bucket by bucket, or at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .bucket import Bucket
from .known import is_known, is_mixed
from .partial_step import NeedsAll
from .separable import check_separable
from .trial import Trial, params_of


class StepChoice:
    """What is known of an optimizer, and how its next step is to be made.

    separable: as in `TieringManager.register_optimizer`. at_once: each step is made at once. in_order: where steps
    are not, parameters have to be stepped in the order of the groups. closure_first: a step calls a closure once,
    before all else.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, separable: bool | None) -> None:
        self._optimizer = optimizer
        self._separable = separable
        self._known = self.closure_first = is_known(optimizer)
        self.in_order = not self._known
        self.look_at_groups()
        self.at_once = not (self._known and self._one_by_one) if separable is None else not separable
        self._taken: set[object] = set()

    def check(self, trial: Trial) -> None:
        """Raises NeedsAll where the user's word is not true, as far as that can be found out."""
        if self._separable and not self._one_by_one:
            raise NeedsAll(self._optimizer, "a group has parameters on several devices or of several types")
        if self._separable and not self._known:
            check_separable(self._optimizer, trial)

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

    def check_gradients(self, trial: Trial) -> None:
        """Raises what the optimizer does for gradients that it does not take, before anything is changed."""
        takes_sparse_alone = type(self._optimizer) is torch.optim.SparseAdam
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None or (param.grad.layout is torch.strided) is not takes_sparse_alone:
                    continue
                kind = (id(group), param.dtype, param.grad.layout)
                if kind not in self._taken:
                    trial.check_gradient(param, group)
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
