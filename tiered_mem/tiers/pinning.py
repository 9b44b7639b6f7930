"""Where the host tier's memory comes from: the first source that torch recognises as pinned."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from typing import Any

import torch

from ..allocators.acl import AclPinnedMemory, AclRegistrar, AclRuntime
from ..allocators.base import DirectMemory, HostMemory, HostPool, OutOfHostMemory, Region, round_up
from ..allocators.cuda import CudaError, CudaPinnedMemory, CudaRegistrar
from ..allocators.pages import LockedMemory, PageableMemory, node_of_pci
from ..allocators.runtime import RegisteredMemory, RuntimeRegistrar, cannot_pin
from ..allocators.slab import SlabPool
from ..device.device import Device
from ..errors import PinningFailed
from ..ground.arguments import whole_number, with_methods, yes_or_no
from ..sizes import format_bytes
from .host_budget import (
    HostBytes,
    HostLimit,
    PoolsOfProcess,
    host_budget,
    host_limit,
    memlock_limit,
    node_budget,
)
from .host_tier import HostTier, bytes_of, is_pinned
from .node_budget import NodeBudget
from .node_memory import NodeMemory
from .node_share import EqualShare, NodeShare

_log = logging.getLogger("tiered_mem.tiers")

# What host memory there is, there is for all managers of a process, which know nothing of each other.
_POOLS = PoolsOfProcess()

_SLAB_BYTES = 1 << 30
# A slab of memory that ranks share is at most this part of all.
_SLABS_OF_NODE = 128
_PROBE_BYTES = 2 << 20

# Each source by its name. The argument is the NUMA node of the device, None where it is not known.
_SOURCES: dict[str, Callable[[int | None], HostMemory]] = {
    "acl": lambda node: AclPinnedMemory(),
    "npurt": lambda node: RegisteredMemory(NpurtRegistrar(), numa_node=node),
    "acl-register": lambda node: RegisteredMemory(AclRegistrar(), numa_node=node),
    "cudart": lambda node: RegisteredMemory(CudartRegistrar(), numa_node=node),
    "cuda-register": lambda node: RegisteredMemory(CudaRegistrar(), numa_node=node),
    "cuda": lambda node: CudaPinnedMemory(),
    "torch": lambda node: TorchPinnedMemory(),
    "locked": lambda node: LockedMemory(numa_node=node),
    "pages": lambda node: PageableMemory(numa_node=node),
}

# What is tried until torch recognises one. For an NPU the runtime's own memory comes first, because kernels up to
# 5.10 take no other; for CUDA registered pages, which are touched by several threads and therefore pinned several
# times as fast. torch itself, which rounds every request up to a power of two, is the last resort.
_TRIED = {
    "npu": ("acl", "npurt", "acl-register", "torch"),
    "cuda": ("cuda-register", "cudart", "cuda", "torch"),
}


def host_tier(
    device: Device,
    host_bytes: HostBytes,
    pin: bool | str,
    preallocate: bool | None,
    host_pool: HostPool | None,
    steps_in_flight: int,
    node: NodeBudget,
) -> HostTier:
    """Arguments and errors are those of TieringManager. The tier leaves the node when it is closed."""
    whole_number("steps_in_flight", steps_in_flight, at_least=1)
    if host_pool is not None:
        with_methods("host_pool", host_pool, ("allocate", "deallocate", "slab", "trim", "stats"))
        if (host_bytes, pin, preallocate) != (None, True, None):
            raise ValueError("host_pool comes in place of host_bytes, pin and preallocate: give either it or these")
        return HostTier(host_pool, device, steps_in_flight=steps_in_flight, owned=False, node=node)
    if not isinstance(pin, bool) and pin not in ("try", *_SOURCES):
        raise ValueError(f"pin={pin!r} is not known; say True, False, 'try', or one of {', '.join(_SOURCES)}")
    modelled = None if device.kind == "cpu" else offered_host()
    limits = [host_limit(modelled=modelled)]
    own_limits = [locked] if pin == "locked" and (locked := memlock_limit()) else []
    if preallocate is None:
        preallocate = host_bytes not in (None, "auto")
    yes_or_no("preallocate", preallocate)
    with _POOLS as others:
        share = None
        if node.shares_host:
            total = node_budget(node.asked, limits=limits, processes=node.ranks, given=others.given_alone)
            capacity, part = _part_of_node(host_bytes, total, own_limits, node.ranks)
            share = node.share_host(total.nbytes, most=part if preallocate else capacity, now=preallocate)
            capacity = min(capacity, share.limit)
        else:
            given = others.given
            capacity = part = host_budget(
                host_bytes, limits=[*limits, *own_limits], processes=node.ranks, given=given
            )
            if given:
                _log.info(
                    "beside other managers, of %s, this one has %s of host memory",
                    *map(format_bytes, (given, capacity)),
                )
        _, pool = chosen_pool(device, capacity, pin, preallocate=preallocate, share=share)
        others.add(pool, part, shared=share is not None)
    node.watch(pool)
    return HostTier(pool, device, steps_in_flight=steps_in_flight, node=node)


def _part_of_node(asked: HostBytes, total: HostLimit, own: Sequence[HostLimit], ranks: int) -> tuple[int, int]:
    """The most that one rank may take of what all share, and what it is taken to have where that is not said.

    own: limits for each process by itself.
    """
    if asked is not None and asked != "auto":
        capacity = host_budget(asked, limits=[total, *own], processes=1)
        return capacity, capacity
    capacity = min([total.nbytes, *(host_budget(asked, limits=[limit], processes=1) for limit in own)])
    return capacity, max(1, min(capacity, total.nbytes // ranks))


def offered_host() -> HostLimit | None:
    """The memory of another machine, where an installed package has this process run as if it were there.

    It says how many bytes that has by an entry point "tiered_mem.hosts", a function without arguments. None where
    pinned memory is this machine's.
    """
    for entry in entry_points(group="tiered_mem.hosts"):
        if (nbytes := entry.load()()) is not None:
            return HostLimit(nbytes, f"the memory of the machine that {entry.module.partition('.')[0]} models")
    return None


def chosen_pool(
    device: Device,
    capacity: int,
    pin: bool | str,
    *,
    preallocate: bool,
    share: NodeShare | EqualShare | None = None,
) -> tuple[str, SlabPool]:
    """A pool of at most `capacity` bytes for copies from and to the device, and the name of its source.

    pin: True is memory that torch recognises as pinned; "try" is the same, and plain pages where there is none,
        with a warning; False is plain pages; the name of a source is that source, whatever torch makes of it.
    preallocate: take all of the capacity now, or the floor of its share. Where there is less, the pool gets less,
        with a warning.
    share: of what the ranks of this machine share; None is memory of this process's own.

    Raises PinningFailed.
    """
    at = numa_node(device)
    first = 0 if not preallocate else capacity if share is None else min(capacity, share.floor)

    def pool_of(name: str) -> SlabPool:
        return _pool(_SOURCES[name](at), capacity, share)

    if pin is False or device.kind == "cpu":
        return "pages", _filled(pool_of("pages"), first)
    names = _TRIED[device.kind] if pin is True or pin == "try" else (str(pin),)
    reasons = []
    for name in names:
        try:
            return name, _filled(_pinned(pool_of(name), whatever=name == pin), first)
        except (OSError, RuntimeError, OutOfHostMemory) as error:
            _log.info("host memory does not come from %r: %s", name, str(error))
            reasons.append(f"{name}: {error}")
    tried = "; ".join(reasons)
    if pin != "try":
        raise PinningFailed(
            f"no pinned host memory for {device.torch_device}: {tried}. Lower host_bytes, or say pin='try' or "
            "pin=False to run with memory that is not pinned, for which the host waits at each copy"
        )
    _log.warning("host memory is not pinned, and the host waits at each copy: %s", tried)
    return "pages", _filled(pool_of("pages"), first)


def tried_sources(kind: str) -> tuple[str, ...]:
    """The sources that pin=True goes through for a kind of device, in this order."""
    return _TRIED.get(kind, ())


@contextlib.contextmanager
def pinned_slab(device: Device, nbytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Host memory for copies from and to the device, for as long as this is entered, and the name of its source."""
    pin, pool = chosen_pool(device, nbytes, "try", preallocate=True)
    with pool:
        region = pool.allocate(nbytes)
        try:
            yield pin, bytes_of(pool.slab(region))
        finally:
            pool.deallocate(region)


def numa_node(device: Device) -> int | None:
    """The NUMA node that the device is attached to; None where it is unknown."""
    if device.kind == "npu":
        address = AclRuntime().pci_bus_id(device.torch_device.index)
    elif device.kind == "cuda":
        properties: Any = torch.cuda.get_device_properties(device.torch_device)
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    else:
        address = None
    return None if address is None else node_of_pci(address)


class TorchPinnedMemory(DirectMemory[torch.Tensor]):
    """A `HostMemory` from torch's own pinned allocator, which rounds every request up to a power of two.

    For stacks on which torch does not recognise memory pinned by others. Memory that is given back stays with
    torch, for its next request of that size.
    """

    def footprint(self, nbytes: int) -> int:
        """Return how much torch pins for a region: a power of two."""
        return 1 << max(nbytes - 1, 0).bit_length()

    def _obtain(self, nbytes: int) -> tuple[int, torch.Tensor]:
        tensor = _pinned_by_torch(nbytes)
        if round_up(tensor.data_ptr()) != tensor.data_ptr():  # torch puts small ones next to each other
            tensor = _pinned_by_torch(nbytes + round_up(1))
        return round_up(tensor.data_ptr()), tensor

    def _give_back(self, region: Region, held: torch.Tensor) -> None:
        """The memory is free when nothing refers to the tensor any more."""


class NpurtRegistrar(RuntimeRegistrar):
    """A `Registrar` that makes memory known to Ascend's runtime through torch_npu. The runtime's error is AclError.

    npurt: torch.npu.npurt() by default. Raises RuntimeError if torch_npu is not loaded or is too old to have it,
        and OSError if Ascend's runtime is not found.
    """

    def __init__(self, npurt: Any = None) -> None:
        npurt = _npurt() if npurt is None else npurt
        error = AclRuntime().error  # torch_npu says nothing of a failure but its code
        super().__init__(npurt, error, "npuHostRegister", "npuHostUnregister", AclRegistrar.PINNED)


class CudartRegistrar(RuntimeRegistrar):
    """A `Registrar` that makes memory known to the CUDA runtime through torch, which may have it built in.

    The runtime's error is CudaError.

    cudart: torch.cuda.cudart() by default. Raises RuntimeError if torch has no CUDA.
    forget: drops the error that CUDA remembers from a failed call.
    """

    def __init__(self, cudart: Any = None, forget: Callable[[], None] | None = None) -> None:
        self._cudart = _cudart() if cudart is None else cudart
        self._forget = _launch_a_kernel if forget is None else forget
        register, unregister = "cudaHostRegister", "cudaHostUnregister"
        super().__init__(self._cudart, self._failure, register, unregister, CudaRegistrar.PORTABLE)

    def _failure(self, function: str, status: Any, nbytes: int | None = None) -> CudaError:
        self._forget()
        return CudaError(function, int(status), nbytes, self._cudart.cudaGetErrorString(status))


def _pool(source: HostMemory, capacity: int, share: NodeShare | EqualShare | None) -> SlabPool:
    if share is None:
        return SlabPool(source, min(_SLAB_BYTES, capacity), capacity)
    # What a rank has in a slab that it does not fill is missing elsewhere.
    slab_bytes = max(1, min(_SLAB_BYTES, capacity, share.limit // _SLABS_OF_NODE))
    return SlabPool(NodeMemory(source, share), slab_bytes, capacity)


def _pinned(pool: SlabPool, *, whatever: bool) -> SlabPool:
    """The pool, if torch takes its memory for pinned. Where it does not: PinningFailed, or a warning."""
    pool.preallocate(min(_PROBE_BYTES, pool.stats().capacity or _PROBE_BYTES))
    region = pool.allocate(1)
    recognised = is_pinned(bytes_of(pool.slab(region)))
    pool.deallocate(region)
    try:
        pool.trim()
    except RuntimeError as error:  # the small slab stays in the pool, then
        _log.warning("%s", str(error))
    if not recognised:
        if not whatever:
            raise PinningFailed("torch does not recognise its memory as pinned")
        _log.warning("torch does not recognise the memory as pinned, and the host waits at each copy")
    return pool


def _filled(pool: SlabPool, nbytes: int) -> SlabPool:
    """The pool with so many bytes taken in advance, or with what there is."""
    if nbytes:
        try:
            pool.preallocate(nbytes)
        except OutOfHostMemory as error:
            reserved = pool.stats().reserved
            if reserved == 0:
                raise
            _log.warning("the host pool has %s of %s: %s", *map(format_bytes, (reserved, nbytes)), str(error))
    return pool


def _pinned_by_torch(nbytes: int) -> torch.Tensor:
    try:
        tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise _not_pinned(nbytes, error) from error
    if tensor.data_ptr() != 0:
        return tensor
    # Where torch_npu cannot pin it says nothing, gives null, and keeps that for the next request of the size.
    runtime = AclRuntime()
    failure = runtime.recall("aclrtMallocHost", nbytes)
    del tensor
    torch.get_device_module().host_empty_cache()
    runtime.recall("aclrtFreeHost", nbytes)  # it has freed null as well
    raise _not_pinned(nbytes, failure)


def _not_pinned(nbytes: int, why: RuntimeError) -> OutOfHostMemory:
    return cannot_pin(f"torch could not pin {format_bytes(nbytes)}: {why}", nbytes)


def _npurt() -> Any:
    module = torch.get_device_module("npu")
    if not hasattr(module, "npurt"):
        raise RuntimeError("this torch_npu has no npurt(); update it, or register by AclRegistrar")
    return module.npurt()


def _cudart() -> Any:
    module: Any = torch.cuda
    if torch.version.cuda is None:
        raise RuntimeError("this torch is built without CUDA")
    return module.cudart()


def _launch_a_kernel() -> None:
    # torch does not bind cudaGetLastError. The check after a launch calls it, and takes what it finds for
    # that launch's own error.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
