"""How fast bytes move: between a device and host memory, and between the host and the tier below it.

Nothing here imports torch: the command line measures a drive where there is none.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..ground.interrupts import uninterrupted
from ..policies.planning.profile import Link
from ..spill.filesystem import memory_at, pages
from ..spill.lower_tier import Job, LowerTier, Piece, Record
from ..spill.record import ALIGNMENT

if TYPE_CHECKING:
    import torch

    from ..device.device import Device, Stream

_COPIES = 2
# As many as the disk tier has threads. Blocks that leave together are of up to so many bytes.
_FEWEST_RECORDS, _RECORD_BYTES = 4, 8 << 20
_MEMORY_BYTES = 256 << 20


def measured_link(device: Device, on_host: torch.Tensor, rounds: int = 7, beside: float = 0.0) -> Link:
    """The medians of rounds in which each half of a slab is copied eight times. Takes as much of the device.

    beside: above 0, the seconds of the device in which other processes begin to measure too. The rounds go on for
        as long, and the slowest quarter of them counts: in those there were others. Nobody waits for them.
    """
    half = len(on_host) // 2
    on_device = on_host.new_zeros(2 * half, device=device.torch_device)
    out = (device.new_stream(), on_host[:half], on_device[:half])
    back = (device.new_stream(), on_device[half:], on_host[half : 2 * half])

    def copied() -> list[float]:
        return [_seconds(device, copies) for copies in ([out], [back], [out, back])]

    copied()
    seconds: list[list[float]] = []
    while len(seconds) < rounds or sum(map(sum, seconds)) < beside:
        seconds.append(copied())
    if beside > 0:
        seconds = sorted(seconds, key=sum)[-max(rounds, len(seconds) // 4) :]
    return _link(_COPIES * half, seconds)


def room_for(nbytes: int) -> int:
    """What a tier must have room for to be measured with so many bytes."""
    count, record = _cut(nbytes)
    return 2 * (count + 1) * (record + ALIGNMENT)


def measured_tier(
    tier: LowerTier, nbytes: int, *, rounds: int = 1, moved: Callable[[int], None] = lambda nbytes: None
) -> Link:
    """Writes about so many bytes in several records, reads them, and does both at once; the medians of all rounds.

    Before that they are written once without a look at the time, as the first step of a training makes the files
    that the next ones use again.

    moved: hears of the bytes that were moved since the last call; of 1 + 4 * rounds times nbytes in all.

    Raises TierFull where the tier takes nothing, and OSError where it fails.
    """
    count, record = _cut(nbytes)
    buffers = min(count, _MEMORY_BYTES // record)
    with pages(buffers * record) as start:
        noise = os.urandom(record)  # which nothing on the way can compress
        for number in range(buffers):
            memory_at(start + number * record, record)[:] = noise
        # A buffer may go into several records, and gets back the bytes that it has.
        trial = _Trial(tier, [start + number % buffers * record for number in range(count)], record, moved)
        try:
            return trial.link(rounds)
        finally:
            trial.close()


class _Trial:
    """Records of `nbytes` bytes each, from memory at these addresses and back.

    A job that it does not know of would go on with memory that is gone.
    """

    def __init__(
        self, tier: LowerTier, addresses: Sequence[int], nbytes: int, moved: Callable[[int], None]
    ) -> None:
        self._tier = tier
        self._addresses = addresses
        self._nbytes = nbytes
        self._moved = moved
        self._jobs: list[Job] = []
        self._records: list[Record] = []

    def link(self, rounds: int) -> Link:
        small = self._write(self._addresses[:1], ALIGNMENT)
        self._wait(0)
        began = self._tier.now()
        self._read(small)
        latency = self._wait(0) - began
        self._write(self._addresses, self._nbytes)
        self._wait(self._nbytes)
        self._release()
        seconds = [list(self._round()) for _ in range(rounds)]
        link = _link(len(self._addresses) * self._nbytes, seconds)
        return replace(link, latency=max(latency, 0.0))

    @uninterrupted
    def close(self) -> None:
        self._release()
        for job in self._jobs:
            job.wait()

    def _round(self) -> Iterable[float]:
        began = self._tier.now()
        records = self._write(self._addresses, self._nbytes)
        yield (written := self._wait(self._nbytes)) - began
        self._read(records)
        yield (read := self._wait(self._nbytes)) - written
        self._write(self._addresses, self._nbytes)
        self._read(records)
        yield self._wait(self._nbytes) - read
        self._release()

    @uninterrupted
    def _write(self, addresses: Sequence[int], nbytes: int) -> list[Record]:
        records = []
        for ptr in addresses:
            records.append(self._tier.write([Piece("trial", ptr, nbytes, "uint8")], step=0, kind="trial"))
            self._records.append(records[-1])
            self._jobs.append(records[-1].job)
        return records

    @uninterrupted
    def _read(self, records: Sequence[Record]) -> None:
        for record, ptr in zip(records, self._addresses, strict=False):
            self._jobs.append(self._tier.read(record, [(0, ptr)]))

    def _wait(self, nbytes: int) -> float:
        """Until all is done, each with so many bytes. The time then. Raises the error of what failed."""
        for job in self._jobs:
            job.wait()
            if job.error is not None:
                raise job.error
            self._moved(nbytes)
        self._jobs.clear()
        return self._tier.now()

    def _release(self) -> None:
        for record in self._records:
            self._tier.release(record)
        self._records.clear()


def _cut(nbytes: int) -> tuple[int, int]:
    """How many records, and of how many bytes each, are about so many bytes."""
    count = max(_FEWEST_RECORDS, -(-nbytes // _RECORD_BYTES))
    return count, max(1, nbytes // count // ALIGNMENT) * ALIGNMENT


def _seconds(device: Device, copies: Sequence[tuple[Stream, torch.Tensor, torch.Tensor]]) -> float:
    """How long copies take that begin together: each on a stream, to memory, of memory."""
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
    return max(device.elapsed(start, end) for end in ends)


def _link(nbytes: int, rounds: Sequence[Sequence[float]]) -> Link:
    """What the seconds of rounds say: for so many bytes out, back, and in both directions at once."""
    out, back, both = (max(statistics.median(each), 1e-9) for each in zip(*rounds, strict=True))
    share = min(1.0, 2 * nbytes / both / (nbytes / out + nbytes / back))
    return Link(nbytes / out, nbytes / back, both=share)
