"""Host memory to tier into: where it comes from, what may be put before it, and the pool that shares it out."""

from .acl import AclPinnedMemory, AclRegistrar
from .acl_runtime import AclError, AclRuntime
from .base import ALIGNMENT, HostMemory, HostPool, OutOfHostMemory, PoolStats, Region, round_up
from .counted import Count, CountedMemory, MemoryCounts
from .cuda import CudaError, CudaPinnedMemory, CudaRegistrar
from .direct import DirectMemory
from .limited import LimitedMemory
from .numa import node_of_pci
from .pageable import LockedMemory, PageableMemory
from .recorded import Allocated, Deallocated, Marked, Operation, RecordedPool, read_trace
from .registered import RegisteredMemory, Registrar
from .retried import RetriedMemory
from .runtime import cannot_pin
from .slab import SlabPool

__all__ = [
    "ALIGNMENT",
    "AclError",
    "AclPinnedMemory",
    "AclRegistrar",
    "AclRuntime",
    "Allocated",
    "Count",
    "CountedMemory",
    "CudaError",
    "CudaPinnedMemory",
    "CudaRegistrar",
    "Deallocated",
    "DirectMemory",
    "HostMemory",
    "HostPool",
    "LimitedMemory",
    "LockedMemory",
    "Marked",
    "MemoryCounts",
    "Operation",
    "OutOfHostMemory",
    "PageableMemory",
    "PoolStats",
    "RecordedPool",
    "Region",
    "RegisteredMemory",
    "Registrar",
    "RetriedMemory",
    "SlabPool",
    "cannot_pin",
    "node_of_pci",
    "read_trace",
    "round_up",
]
