"""The speed of copies between a device and a slab of host memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..device import Device, Stream, default_device
from ..errors import DeviceUnavailable
from ..host_memory import chosen_pool
from ..host_tier import bytes_of, is_pinned

_BYTES = 64 << 20
_COPIES, _ROUNDS = 2, 7
_ALIGNMENTS = [1 << bits for bits in range(31)]


@dataclass(frozen=True, slots=True)
class Link:
    """A measured link. Speeds are in 1e9 bytes per second.

    device: its name. numa_node: where it is attached; None where that is not known. pin: the source of the host
    memory, as TieringManager's `pin` names it. pinned: whether torch takes that memory for pinned. alignment: the
    largest power of two up to 1 GiB that divides the slab's address. both: the sum of both directions at once.
    """

    device: str
    numa_node: int | None
    pin: str
    pinned: bool
    alignment: int
    to_device: float
    from_device: float
    both: float


def link_to(asked: str | None) -> tuple[Link | None, str]:
    """The link to the device `asked`, by default to torch's accelerator; or None and the reason.

    Raises ValueError for an unknown kind, and DeviceUnavailable where `asked` is not on this machine.
    """
    device, why = _device(asked)
    if device is None:
        return None, why
    try:
        return measure_link(device), ""
    except torch.OutOfMemoryError as error:
        return None, f"the device has no 128 MiB left: {error}".splitlines()[0]


def measure_link(device: Device) -> Link:
    """Copies 64 MiB at a time, about 40 times. Takes 128 MiB of the device and of the host.

    Raises torch.OutOfMemoryError, and PinningFailed where there is no host memory at all.
    """
    on_device = torch.zeros(2 * _BYTES, dtype=torch.uint8, device=device.torch_device)
    pin, pool = chosen_pool(device, 2 * _BYTES, "try", preallocate=True)
    with pool:
        region = pool.allocate(2 * _BYTES)
        slab = pool.slab(region)
        # From the slab's start on, which is where torch looks.
        on_host = bytes_of(slab)
        down = Copy(device.new_stream(), on_host[:_BYTES], on_device[:_BYTES])
        up = Copy(device.new_stream(), on_device[_BYTES:], on_host[_BYTES : 2 * _BYTES])
        rounds = [[_speed(device, copies) for copies in ([up], [down], [up, down])] for _ in range(_ROUNDS + 1)]
        to_device, from_device, both = (statistics.median(each) for each in zip(*rounds[1:], strict=True))
        link = Link(
            device=_name(device),
            numa_node=device.numa_node(),
            pin=pin,
            pinned=is_pinned(on_host),
            alignment=max(each for each in _ALIGNMENTS if slab.ptr % each == 0),
            to_device=to_device,
            from_device=from_device,
            both=both,
        )
        pool.deallocate(region)
    return link


def _device(asked: str | None) -> tuple[Device | None, str]:
    if asked is not None:
        device = Device(asked)
        return (None, "it was not asked for") if device.kind == "cpu" else (device, "")
    if not torch.accelerator.is_available():
        return None, "torch finds no accelerator here"
    try:
        return Device(default_device()), ""
    except (DeviceUnavailable, ValueError) as error:
        return None, str(error)


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy from one memory to another, on a stream."""

    stream: Stream
    to: torch.Tensor
    of: torch.Tensor


def _speed(device: Device, copies: Sequence[Copy]) -> float:
    """The speed of copies that begin together, in 1e9 bytes per second."""
    current = device.current_stream()
    start = device.timed_event(current)
    ends = []
    for each in copies:
        each.stream.wait_event(start)
        with device.on(each.stream):
            for _ in range(_COPIES):
                each.to.copy_(each.of, non_blocking=True)
        ends.append(device.timed_event(each.stream))
    for end in ends:
        current.wait_event(end)
        end.synchronize()
    seconds = max(device.elapsed(start, end) for end in ends)
    return len(copies) * _COPIES * _BYTES / max(seconds, 1e-9) / 1e9


def _name(device: Device) -> str:
    return str(torch.get_device_module(device.kind).get_device_name(device.torch_device))
