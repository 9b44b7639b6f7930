"""Host memory to tier into: where it comes from, and the pool that shares it out."""

from .acl import AclError, AclPinnedMemory, AclRegistrar, AclRuntime
from .base import ALIGNMENT, DirectMemory, HostMemory, HostPool, OutOfHostMemory, PoolStats, Region, round_up
from .cuda import CudaError, CudaPinnedMemory, CudaRegistrar
from .pages import LockedMemory, PageableMemory, node_of_pci
from .runtime import RegisteredMemory, Registrar, cannot_pin
from .slab import SlabPool

__all__ = [
    "ALIGNMENT",
    "AclError",
    "AclPinnedMemory",
    "AclRegistrar",
    "AclRuntime",
    "CudaError",
    "CudaPinnedMemory",
    "CudaRegistrar",
    "DirectMemory",
    "HostMemory",
    "HostPool",
    "LockedMemory",
    "OutOfHostMemory",
    "PageableMemory",
    "PoolStats",
    "Region",
    "RegisteredMemory",
    "Registrar",
    "SlabPool",
    "cannot_pin",
    "node_of_pci",
    "round_up",
]
