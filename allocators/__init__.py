"""Host memory to tier into: where it comes from, and the pool that shares it out."""

from .acl import AclPinnedMemory
from .base import HostMemory, HostPool, OutOfHostMemory, PoolStats, Region, round_up
from .pageable import PageableMemory
from .slab import SlabPool

__all__ = [
    "AclPinnedMemory",
    "HostMemory",
    "HostPool",
    "OutOfHostMemory",
    "PageableMemory",
    "PoolStats",
    "Region",
    "SlabPool",
    "round_up",
]
