"""The speed of copies between a device and a slab of host memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..device.device import Device, Stream
from ..errors import DeviceUnavailable
from .host_tier import bytes_of, is_pinned
from .pinning import chosen_pool, numa_node

_BYTES = 64 << 20
_COPIES, _ROUNDS = 2, 7
_ALIGNMENTS = [1 << bits for bits in range(31)]


@dataclass(frozen=True, slots=True)
class MeasuredLink:
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


def link_to(asked: str | None) -> tuple[MeasuredLink | None, str]:
    """The link to the device `asked`, by default to torch's accelerator; or None and the reason.

    Raises ValueError for an unknown kind, DeviceUnavailable where `asked` is not on this machine, and PinningFailed
    where there is no host memory at all.
    """
    if asked is not None:
        device = Device(asked)
        if device.kind == "cpu":
            return None, "it was not asked for"
    elif not torch.accelerator.is_available():
        return None, "torch finds no accelerator here"
    else:
        try:
            device = Device(None)
        except (DeviceUnavailable, ValueError) as error:
            return None, str(error)
    try:
        return measured(device), ""
    except torch.OutOfMemoryError as error:
        return None, f"the device has no 128 MiB left: {error}".splitlines()[0]


def measured(device: Device, nbytes: int = _BYTES, rounds: int = _ROUNDS) -> MeasuredLink:
    """Copies `nbytes` eight times a round. Takes twice as much of the device and of the host."""
    on_device = torch.zeros(2 * nbytes, dtype=torch.uint8, device=device.torch_device)
    pin, pool = chosen_pool(device, 2 * nbytes, "try", preallocate=True)
    with pool:
        region = pool.allocate(2 * nbytes)
        slab = pool.slab(region)
        # From the slab's start on, which is where torch looks.
        on_host = bytes_of(slab)
        down = (device.new_stream(), on_host[:nbytes], on_device[:nbytes])
        up = (device.new_stream(), on_device[nbytes:], on_host[nbytes : 2 * nbytes])
        speeds = [[_speed(device, copies) for copies in ([up], [down], [up, down])] for _ in range(rounds + 1)]
        to_device, from_device, both = (statistics.median(each) for each in zip(*speeds[1:], strict=True))
        link = MeasuredLink(
            device=str(torch.get_device_module(device.kind).get_device_name(device.torch_device)),
            numa_node=numa_node(device),
            pin=pin,
            pinned=is_pinned(on_host),
            alignment=max(each for each in _ALIGNMENTS if slab.ptr % each == 0),
            to_device=to_device,
            from_device=from_device,
            both=both,
        )
        pool.deallocate(region)
    return link


def _speed(device: Device, copies: Sequence[tuple[Stream, torch.Tensor, torch.Tensor]]) -> float:
    """The speed of copies that begin together, in 1e9 bytes per second: each on a stream, to memory, of memory."""
    current = device.current_stream()
    start = device.timed_event(current)
    ends = []
    for stream, to, of in copies:
        stream.wait_event(start)
        with device.on(stream):
            for _ in range(_COPIES):
                to.copy_(of, non_blocking=True)
        ends.append(device.timed_event(stream))
    for end in ends:
        current.wait_event(end)
        end.synchronize()
    seconds = max(device.elapsed(start, end) for end in ends)
    moved = _COPIES * sum(to.nbytes for _, to, _ in copies)
    return moved / max(seconds, 1e-9) / 1e9
