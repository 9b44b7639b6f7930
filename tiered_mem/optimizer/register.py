"""Checks an optimizer, and makes a tiered one of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

import torch

from ..device import Device
from ..spill.disk_tier import DiskTier
from ..tiers import HostTier
from ..transfer import TransferEngine
from .residence import Exclusive
from .residences import DiskResidences, HostResidences, Residences
from .states import States
from .tiered_optimizer import TieredOptimizer

Residency = Literal["host", "disk", "device-until-offload"]


def tiered_optimizer(
    manager: object,
    optimizer: torch.optim.Optimizer,
    known: Collection[TieredOptimizer],
    device: Device,
    engine: TransferEngine,
    exclusive: Exclusive,
    host: HostTier,
    disk: DiskTier | None,
    *,
    bucket_bytes: int,
    residency: Residency,
) -> TieredOptimizer:
    """What `TieringManager.register_optimizer` does.

    manager: is kept alive. known: those that it made before.
    """
    _check(optimizer, known)
    if residency not in get_args(Residency):
        names = ", ".join(map(repr, get_args(Residency)))
        raise ValueError(f"residency is {residency!r}; there are {names}")

    residences: Residences = HostResidences(host, exclusive)
    if residency == "disk":
        if disk is None:
            raise ValueError("residency 'disk' needs a disk tier: make the manager with a spill_dir")
        residences = DiskResidences(host, disk, exclusive, bucket_bytes)
    stay = residency == "device-until-offload"
    states = States(optimizer, device, engine, exclusive, residences, bucket_bytes=bucket_bytes, stay=stay)
    return TieredOptimizer(optimizer, states, manager)


def _check(optimizer: torch.optim.Optimizer, known: Collection[TieredOptimizer]) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"a torch.optim.Optimizer is needed, and this is a {type(optimizer).__name__}")
    if isinstance(optimizer, TieredOptimizer) or any(other.wrapped is optimizer for other in known):
        raise ValueError("the optimizer is registered already: use what register_optimizer returned then")
    for option in ("capturable", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise ValueError(
                f"an optimizer with {option}=True cannot be tiered: its states have to stay where they are. Make "
                f"it with {option}=False"
            )
