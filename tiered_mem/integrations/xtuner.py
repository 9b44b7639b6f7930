"""xtuner v1: an optimizer's configuration. Run with xtuner of August 2026, which no package index has."""

from __future__ import annotations

from typing import Any, Literal

import torch
from xtuner.v1.config.optim import AdamWConfig

from ..configuration import default_manager
from ..optimizer.registered import Residency


class TieredAdamWConfig(AdamWConfig):
    """AdamW, with its states in the default manager's pool: `optim_cfg=TieredAdamWConfig(lr=1e-5)`.

    residency: where the states rest between steps, as in `register_optimizer`.
    """

    # True says that the states are on the host by other means: xtuner leaves them where they are.
    swap_optimizer: Literal[True] = True
    residency: Residency = "host"

    def build(self, model: Any) -> torch.optim.Optimizer:
        """A TieredOptimizer over the one that xtuner makes."""
        plain = AdamWConfig(**self.model_dump(exclude={"swap_optimizer", "residency"}))
        return default_manager().register_optimizer(plain.build(model), residency=self.residency)
