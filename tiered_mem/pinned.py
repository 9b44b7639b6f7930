"""Where the host tier's memory comes from: decided once, by asking torch what it recognises as pinned."""

from __future__ import annotations

import logging

import torch

from .allocators import AclPinnedMemory, HostMemory, OutOfHostMemory, PageableMemory, Region, SlabPool
from .device import Device
from .sizes import format_bytes
from .tiers import bytes_of

_log = logging.getLogger("tiered_mem.pinned")

_SLAB_BYTES = 1 << 30
_PAGE = 4096


class TorchPinnedMemory:
    """Slabs from torch's own pinned allocator, which rounds every request up to a power of two.

    For stacks on which torch does not recognise memory pinned by others.
    """

    def __init__(self) -> None:
        self._live: dict[int, torch.Tensor] = {}

    def allocate(self, nbytes: int) -> Region:
        """Raises OutOfHostMemory where torch cannot pin that much."""
        try:
            tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            used = sum(live.numel() for live in self._live.values())
            reason = f"torch could not pin {format_bytes(nbytes)}: {error}"
            raise OutOfHostMemory(reason, "Lower host_bytes", nbytes, used) from error
        self._live[tensor.data_ptr()] = tensor
        return Region(tensor.data_ptr(), nbytes)

    def deallocate(self, region: Region) -> None:
        if region.ptr not in self._live:
            raise ValueError(f"{region} are not allocated from TorchPinnedMemory")
        del self._live[region.ptr]

    def footprint(self, nbytes: int) -> int:
        """Return how much torch pins for a region: a power of two."""
        return 1 << max(nbytes - 1, 0).bit_length()

    def close(self) -> None:
        if self._live:
            raise RuntimeError(f"cannot close TorchPinnedMemory: {len(self._live)} regions are still allocated")


def host_pool(device: Device, capacity: int) -> SlabPool:
    """A pool of at most `capacity` bytes, over the best memory that torch recognises as pinned for the device."""
    source = _source(device)
    slab_bytes = min(_SLAB_BYTES, capacity)
    if isinstance(source, TorchPinnedMemory):
        slab_bytes = 1 << (slab_bytes.bit_length() - 1)
        capacity -= capacity % slab_bytes
    return SlabPool(source, slab_bytes, capacity)


def _source(device: Device) -> HostMemory:
    if device.kind == "cpu":
        return PageableMemory()
    if device.kind == "npu":
        acl = AclPinnedMemory()
        if _recognised_as_pinned(acl):
            return acl
        _log.info("torch does not recognise memory of aclrtMallocHost as pinned; slabs come from torch instead")
    return TorchPinnedMemory()


def _recognised_as_pinned(source: HostMemory) -> bool:
    region = source.allocate(_PAGE)
    try:
        return bytes_of(region).is_pinned()
    finally:
        source.deallocate(region)
