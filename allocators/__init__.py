"""Host memory to tier into: where it comes from, and the pool that shares it out."""

from .acl import AclPinnedMemory
from .base import ALIGNMENT, HostMemory, OutOfHostMemory, Region
from .pageable import PageableMemory
from .slab import PoolStats, SlabPool

__all__ = [
    "ALIGNMENT",
    "AclPinnedMemory",
    "HostMemory",
    "OutOfHostMemory",
    "PageableMemory",
    "PoolStats",
    "Region",
    "SlabPool",
]
