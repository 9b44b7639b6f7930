"""Asynchronous memory tiering for training on accelerators."""

from .context import OffloadContext
from .errors import ChangedTensor, Closed, DeviceUnavailable, PolicyError, TieredMemError, TierFull
from .manager import TieringManager

__all__ = [
    "ChangedTensor",
    "Closed",
    "DeviceUnavailable",
    "OffloadContext",
    "PolicyError",
    "TierFull",
    "TieredMemError",
    "TieringManager",
]
