"""verl: FSDP engines that tier, which VERL_ENGINE_VENDOR=tiered_mem chooses. Run with verl 0.9.

verl loads this in each of its processes, by the entry point `verl.plugins`. Without that variable it does nothing.
The optimizer's states need none of it: `actor.optim.optimizer_impl=tiered_mem.optim`.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from .tiering import refuse_others

_log = logging.getLogger("tiered_mem.integrations")
VENDOR = "tiered_mem"


class AttachedEngine:
    """What the engines do beside verl's: the model is attached to the default manager when it is made.

    min_bytes: as for TieringManager.offload_context().

    Raises ValueError with another offloader on.
    """

    min_bytes: int | str | None = None
    module: Any
    optimizer: Any
    model_config: Any
    engine_config: Any
    optimizer_config: Any

    def _build_model_optimizer(self) -> None:
        from ..configuration import default_manager

        refuse_others(self._other_offloaders(), f"VERL_ENGINE_VENDOR={VENDOR}")
        super()._build_model_optimizer()  # type: ignore[misc]
        if not self.engine_config.forward_only:
            default_manager().attach(self.module, min_bytes=self.min_bytes)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """As verl's, without the states of a tiered optimizer: they rest on the host as it is."""
        from ..optimizer.tiered_optimizer import TieredOptimizer

        moves = optimizer and not isinstance(self.optimizer, TieredOptimizer)
        super().to(device, model=model, optimizer=moves, grad=grad)  # type: ignore[misc]

    def _other_offloaders(self) -> dict[str, object]:
        tiered = getattr(self.optimizer_config, "optimizer_impl", "") == "tiered_mem.optim"
        return {
            "model.enable_activation_offload=True": self.model_config.enable_activation_offload,
            "fsdp_config.offload_policy=True": self.engine_config.offload_policy,
            "fsdp_config.optimizer_offload=True": tiered and self.engine_config.optimizer_offload,
        }


def register() -> None:
    """Makes the engines known to verl."""
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    for model_type, theirs in {
        "language_model": FSDPEngineWithLMHead,
        "value_model": FSDPEngineWithValueHead,
    }.items():
        ours = type(f"Tiered{theirs.__name__}", (AttachedEngine, theirs), {"__module__": __name__})
        EngineRegistry.register(model_type, ["fsdp", "fsdp2"], device=["cuda", "npu"], vendor=VENDOR)(ours)


if os.environ.get("VERL_ENGINE_VENDOR") == VENDOR:
    try:
        register()
    except Exception:
        # verl tells of it where nobody looks, and takes its own engines.
        _log.exception("verl's engines cannot be had, and nothing is tiered")
        raise
