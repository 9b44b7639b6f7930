"""The order of copies and kernels: small programs that come to wrong numbers where it is lost."""

from __future__ import annotations

import torch

from ..device.device import Stream
from ..tiers.pinning import pinned_slab
from .bench import Bench
from .copies import TO_DEVICE, TO_HOST
from .outcome import Check, Outcome, failed, passed

ARRIVED, RELEASED = "a stream waits for a copy", "a release waits for its copy"
_BYTES, _SLOTS = 4 << 20, 8
_LOAD_S = 1e-3
_OTHER = 255


def order() -> list[Check]:
    one = "a cpu does its work in one order"
    return [
        Check(ARRIVED, _arrived, (TO_DEVICE,), one),
        Check(RELEASED, _released, (TO_HOST,), one),
        Check("reused memory", _reused, (ARRIVED, RELEASED), one),
    ]


def _arrived(bench: Bench) -> Outcome:
    """A kernel that waits for a copy to the device reads the last byte that it brings."""
    device, rounds = bench.device, bench.rounds(200)
    current = device.current_stream()
    with pinned_slab(device, _SLOTS * _BYTES) as (_, on_host):
        slots = _filled(on_host)
        arriving = on_host.new_zeros(_BYTES, device=device.torch_device)
        seen = torch.zeros(rounds, dtype=torch.uint8, device=device.torch_device)
        for number in range(rounds):
            (ticket,) = bench.engine.reload([slots[number % _SLOTS]], [arriving], current, [None])
            ticket.hold(current)
            seen[number].copy_(arriving[-1])
        device.synchronize()
    wrong = int((seen.cpu() != _values(rounds)).sum())
    if wrong:
        return failed(
            f"the stream that waited for a copy to the device read before its end, {wrong} of {rounds} times"
        )
    return passed(f"{rounds} copies were waited for", rounds=(rounds, ""))


def _released(bench: Bench) -> Outcome:
    """Memory that a copy to the host reads is dropped, handed out again, and written at once."""
    device, batches = bench.device, bench.rounds(24)
    current = device.current_stream()
    reused = wrong = 0
    with pinned_slab(device, _SLOTS * _BYTES) as (_, on_host):
        slots = list(torch.split(on_host[: _SLOTS * _BYTES], _BYTES))
        for _ in range(batches):
            for number in range(_SLOTS):
                leaving = device.empty(_BYTES, torch.uint8).fill_(1 + number)
                address = leaving.data_ptr()
                ticket = bench.engine.offload([leaving], [slots[number]], [current])
                ticket.hold(current)
                del leaving
                reused += _taken(bench, current).data_ptr() == address
            device.synchronize()
            wrong += sum(not bool((slot == 1 + number).all()) for number, slot in enumerate(slots))
    rounds = batches * _SLOTS
    if wrong:
        return failed(
            f"memory was written again before its copy to the host had read it, in {wrong} of {rounds} copies"
        )
    return passed(
        f"{rounds} copies read what they should; {reused} times their memory was another's at once",
        rounds=(rounds, ""),
        reused=(reused, ""),
    )


def _reused(bench: Bench) -> Outcome:
    """Copies arrive in memory that late kernels of another tensor were still to write, and leave it for others."""
    device, rounds = bench.device, bench.rounds(200)
    current = device.current_stream()
    reused = 0
    with pinned_slab(device, _SLOTS * _BYTES) as (_, on_host):
        slots = _filled(on_host)
        seen = torch.zeros(rounds, dtype=torch.uint8, device=device.torch_device)
        for number in range(rounds):
            bench.load.begin(current, _LOAD_S)
            address = _taken(bench, current).data_ptr()
            arriving = device.empty(_BYTES, torch.uint8)
            reused += arriving.data_ptr() == address
            (ticket,) = bench.engine.reload([slots[number % _SLOTS]], [arriving], current, [None])
            ticket.hold(current)
            if number % 3:  # each third one is dropped unread
                seen[number].copy_(arriving[0])
            else:
                seen[number].fill_(1 + number % _SLOTS)
            del arriving
        device.synchronize()
    wrong = int((seen.cpu() != _values(rounds)).sum())
    if wrong:
        return failed(f"a copy to the device was overwritten by work from before it, {wrong} of {rounds} times")
    return passed(
        f"{rounds} copies arrived in memory that was in use; {reused} times it was the same piece",
        rounds=(rounds, ""),
        reused=(reused, ""),
    )


def _taken(bench: Bench, stream: Stream) -> torch.Tensor:
    """New memory, which is written to."""
    with bench.device.on(stream):
        return bench.device.empty(_BYTES, torch.uint8).fill_(_OTHER)


def _filled(on_host: torch.Tensor) -> list[torch.Tensor]:
    """Slots, each full of its own number, from 1 on."""
    slots = list(torch.split(on_host[: _SLOTS * _BYTES], _BYTES))
    for number, slot in enumerate(slots, 1):
        slot.fill_(number)
    return slots


def _values(rounds: int) -> torch.Tensor:
    return (1 + torch.arange(rounds) % _SLOTS).to(torch.uint8)
