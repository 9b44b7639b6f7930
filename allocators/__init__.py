"""Host memory to tier into: where it comes from, and the pool that shares it out."""

from .acl import AclPinnedMemory
from .base import HostMemory, HostPool, PoolStats, Region
from .cuda import CudaPinnedMemory
from .pages import LockedMemory, PageableMemory
from .slab import SlabPool

__all__ = [
    "AclPinnedMemory",
    "CudaPinnedMemory",
    "HostMemory",
    "HostPool",
    "LockedMemory",
    "PageableMemory",
    "PoolStats",
    "Region",
    "SlabPool",
]
