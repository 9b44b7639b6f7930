"""Asynchronous memory tiering for training on accelerators."""

from .context import OffloadContext
from .errors import (
    ChangedTensor,
    Closed,
    DeviceFailed,
    DeviceUnavailable,
    Offloaded,
    OffloadRefused,
    PolicyError,
    TieredMemError,
    TierFull,
)
from .manager import TieringManager

__all__ = [
    "ChangedTensor",
    "Closed",
    "DeviceFailed",
    "DeviceUnavailable",
    "OffloadContext",
    "OffloadRefused",
    "Offloaded",
    "PolicyError",
    "TierFull",
    "TieredMemError",
    "TieringManager",
]
