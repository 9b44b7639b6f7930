"""Parameters and their optimizer, to be trained, saved and resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from tests.conftest import KIND
from tests.optimizer.conftest import MakeTiered
from tests.optimizer.training import OPTIMIZERS, Place, differences, make_params, outcome, train
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer


class Trainee:
    """Parameters and their optimizer. place: where its states are to be; None for an unwrapped one."""

    def __init__(
        self,
        place: Place | None,
        make_tiered: MakeTiered,
        kind: str | Callable[..., Optimizer] = "adamw-amsgrad",
        device: str = KIND,
        **options: Any,
    ) -> None:
        self.params = make_params(device)
        self.optimizer = (OPTIMIZERS[kind] if isinstance(kind, str) else kind)(self.params)
        self.place = place
        if place is not None:
            self.optimizer = make_tiered(self.optimizer, residency=place.residency, device=device, **options)

    def train(self, *steps: int, missing: bool = True) -> Trainee:
        train(self.optimizer, self.params, steps, missing=missing)
        return self.settle()

    def settle(self) -> Trainee:
        """Makes the place be as it says."""
        if self.place is not None and self.place.offloaded:
            tiered(self).states.offload()
        return self

    def resume(self, saved: Saved) -> Trainee:
        """Goes on where another one was."""
        self.set_weights(saved.weights)
        self.optimizer.load_state_dict(saved.state_dict)
        return self

    def set_weights(self, weights: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for param, weight in zip(self.params, weights, strict=True):
                param.copy_(weight)

    def save(self) -> Saved:
        return Saved([param.detach().cpu().clone() for param in self.params], self.optimizer.state_dict())

    def differs(self, other: Trainee) -> list[str]:
        return differences(outcome(self.optimizer, self.params), outcome(other.optimizer, other.params))


class Saved(NamedTuple):
    weights: list[torch.Tensor]
    state_dict: dict[str, Any]


def tiered(trainee: Trainee) -> TieredOptimizer:
    assert isinstance(trainee.optimizer, TieredOptimizer)
    return trainee.optimizer
