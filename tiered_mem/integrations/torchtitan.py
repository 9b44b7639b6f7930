"""torchtitan: two overrides, which are named in `--override.imports`. Run with torchtitan 0.3's modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.override import derive, override
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

from ..configuration import default_manager
from ..optimizer.registered import Overlap, Residency
from .tiering import refuse_others


@dataclass(kw_only=True, slots=True)
class OptimizersConfig(OptimizersContainer.Config):
    """residency, overlap: as in `register_optimizer`; torchtitan clips gradients, which "backward" refuses.

    attach: activations move too, for a model without activation checkpointing.
    """

    residency: Residency = "host"
    overlap: Overlap | None = None
    attach: bool = False
    min_bytes: int | str | None = None


class TieredOptimizers(OptimizersContainer):
    """torchtitan's optimizers, with their states in the default manager's pool.

    Raises ValueError where torchtitan keeps the parameters on the host, or makes the states itself.
    """

    Config = OptimizersConfig
    optimizers: list[Any]

    def __init__(self, config: OptimizersConfig, *, model_parts: list[torch.nn.Module]) -> None:
        if config.implementation == "fused_opt_states_bf16":
            raise ValueError(
                "implementation='fused_opt_states_bf16' makes states that the tiered optimizer does not see: "
                "write --optimizer.implementation fused"
            )
        manager = default_manager()
        devices = {each.device.type for part in model_parts for each in part.parameters()}
        on_host = manager.device.kind != "cpu" and "cpu" in devices
        refuse_others({"--training.enable_cpu_offload": on_host}, "tiered_mem.integrations.torchtitan.optimizer")
        super().__init__(config, model_parts=model_parts)
        options: Any = {"residency": config.residency, "overlap": config.overlap}
        self.optimizers = [manager.register_optimizer(each, **options) for each in self.optimizers]
        if config.attach:
            for part in model_parts:
                manager.attach(part, min_bytes=config.min_bytes)


@dataclass(kw_only=True, slots=True)
class AttachingConfig(ActivationCheckpointing.Config):
    """checkpointing: as was configured. min_bytes: as for TieringManager.offload_context()."""

    checkpointing: ActivationCheckpointing.Config
    min_bytes: int | str | None = None


class Attaching(ActivationCheckpointing):
    """Checkpoints as was configured, and attaches the model to the default manager."""

    Config = AttachingConfig
    config: AttachingConfig

    def apply(self, model: torch.nn.Module) -> None:
        checkpointing: Any = self.config.checkpointing.build(dump_folder=self.dump_folder)
        checkpointing.apply(model)
        default_manager().attach(model, min_bytes=self.config.min_bytes)


@override(target=OptimizersContainer.Config, description="optimizer states rest on the host or on disk")
def optimizer(config: OptimizersContainer.Config, **arguments: Any) -> OptimizersConfig:
    """With the arguments of OptimizersConfig."""
    replacing: OptimizersConfig = derive(config, OptimizersConfig, **arguments)
    return replacing


@override(target=ActivationCheckpointing.Config, description="what checkpointing leaves saved is offloaded")
def activations(config: ActivationCheckpointing.Config, **arguments: Any) -> AttachingConfig:
    """min_bytes: as for TieringManager.offload_context()."""
    replacing: AttachingConfig = derive(config, AttachingConfig, checkpointing=config, **arguments)
    return replacing
