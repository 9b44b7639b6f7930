"""Who steps in benchmarks.optimizer_step, and what only copies the same bytes."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn import Parameter
from torch.optim.adamw import AdamW, adamw

from tiered_mem import TieringManager
from tiered_mem.allocators import PageableMemory, SlabPool
from tiered_mem.spill.disk_tier import DiskTier
from tiered_mem.spill.lower_tier import Job, Piece, Record
from tiered_mem.tiers.host_tier import bytes_of

# Of AdamW's states: two moments in fp32.
STATE_BYTES = 8


class Contestant(Protocol):
    name: str
    parameters: Sequence[Parameter]

    def step(self) -> None:
        """Starts what is measured. Work on the device may go on behind it."""

    def wait(self) -> None:
        """Waits for what does not run on the device."""


class Plain:
    """torch's AdamW, with its states on the device."""

    name = "on the device"

    def __init__(self, parameters: Sequence[Parameter], fused: bool) -> None:
        self.parameters = parameters
        self._optimizer = AdamW(parameters, fused=fused, foreach=not fused)

    def step(self) -> None:
        self._optimizer.step()

    def wait(self) -> None:
        pass


class Tiered:
    """The same, with its states where `residency` says."""

    def __init__(
        self,
        manager: TieringManager,
        residency: str,
        bucket_bytes: int,
        parameters: Sequence[Parameter],
        fused: bool,
    ) -> None:
        self.name = f"tiered, {residency}"
        self.parameters = parameters
        self._manager = manager
        optimizer = AdamW(parameters, fused=fused, foreach=not fused)
        self._optimizer = manager.register_optimizer(optimizer, bucket_bytes=bucket_bytes, residency=residency)

    def step(self) -> None:
        self._optimizer.step()

    def wait(self) -> None:
        self._manager.synchronize()


class OneByOne:
    """A published scheme: moments in pinned tensors of their own, each parameter's there and back on one stream."""

    name = "one by one"

    def __init__(self, parameters: Sequence[Parameter], fused: bool) -> None:
        self.parameters = parameters
        self._fused = fused
        self._moments = [[torch.zeros(each.shape, pin_memory=True) for _ in range(2)] for each in parameters]
        counted_on = parameters[0].device if fused else torch.device("cpu")
        self._steps = [torch.zeros((), device=counted_on) for _ in parameters]
        self._defaults = AdamW(parameters).defaults

    @torch.no_grad()
    def step(self) -> None:
        for parameter, moments, count in zip(self.parameters, self._moments, self._steps, strict=True):
            mean, square = (host.to(parameter.device, non_blocking=True) for host in moments)
            if parameter.grad is not None:
                self._update(parameter, parameter.grad, mean, square, count)
            for host, moment in zip(moments, (mean, square), strict=True):
                host.copy_(moment, non_blocking=True)

    def wait(self) -> None:
        pass

    def _update(self, parameter: Parameter, *grad_and_state: torch.Tensor) -> None:
        grad, mean, square, count = grad_and_state
        given = self._defaults
        beta1, beta2 = given["betas"]
        adamw(
            [parameter],
            [grad],
            [mean],
            [square],
            [],
            [count],
            fused=self._fused,
            foreach=not self._fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=given["lr"],
            weight_decay=given["weight_decay"],
            eps=given["eps"],
            maximize=False,
        )


class Copies:
    """As many bytes as the states have, to the device and to the host at once, in pieces of `piece`."""

    name = "copies alone"
    parameters: Sequence[Parameter] = ()

    def __init__(self, kind: str, nbytes: int, piece: int) -> None:
        self._device: Any = getattr(torch, kind)
        self._ways = []
        for to_device in (True, False):
            host = torch.zeros(piece, dtype=torch.uint8, pin_memory=True)
            here = torch.zeros(piece, dtype=torch.uint8, device=kind)
            self._ways.append((self._device.Stream(), *((here, host) if to_device else (host, here))))
        self._lengths = [min(piece, nbytes - begin) for begin in range(0, nbytes, piece)]

    def step(self) -> None:
        for length in self._lengths:
            for stream, to, of in self._ways:
                with self._device.stream(stream):
                    to[:length].copy_(of[:length], non_blocking=True)

    def wait(self) -> None:
        pass


class Drive:
    """Reads as many bytes as the states have from a disk tier's records and writes them back, both at once.

    Each record is written anew as soon as it is read, from the same memory, while the next ones are read.
    """

    name = "drive alone"
    parameters: Sequence[Parameter] = ()
    AHEAD, SLOTS = 2, 6

    def __init__(self, tier: DiskTier, slots: Sequence[int], nbytes: int, piece: int) -> None:
        self._tier, self._slots = tier, slots
        self._lengths = [min(piece, nbytes - begin) for begin in range(0, nbytes, piece)]
        self._records: list[Record] = []
        for number in range(len(self._lengths)):
            self._records.append(self._write(number))
            end(self._records[-1].job)

    @classmethod
    @contextlib.contextmanager
    def below(cls, folder: Path, nbytes: int, piece: int) -> Iterator[Drive]:
        """One with a tier in `folder` and memory of its own."""
        with (
            SlabPool(PageableMemory(), cls.SLOTS * piece) as pool,
            contextlib.closing(DiskTier(folder, capacity=2 * nbytes + (64 << 20))) as tier,
        ):
            regions = [pool.allocate(piece) for _ in range(cls.SLOTS)]
            for region in regions:
                bytes_of(region).random_()  # what no file system can compress
            try:
                yield cls(tier, [region.ptr for region in regions], nbytes, piece)
            finally:
                tier.close()  # its threads use the memory
                for region in regions:
                    pool.deallocate(region)

    def step(self) -> None:
        reads = deque(self._read(number) for number in range(min(self.AHEAD, len(self._records))))
        for number, record in enumerate(self._records):
            end(reads.popleft())
            ahead = number + self.AHEAD
            if ahead < len(self._records):
                if ahead >= self.SLOTS:
                    # Its write is from the memory that is to be read into.
                    end(self._records[ahead - self.SLOTS].job)
                reads.append(self._read(ahead))
            self._tier.release(record)
            self._records[number] = self._write(number)

    def wait(self) -> None:
        for record in self._records:
            end(record.job)

    def _read(self, number: int) -> Job:
        end(self._records[number].job)
        return self._tier.read(self._records[number], [(0, self._slots[number % self.SLOTS])])

    def _write(self, number: int) -> Record:
        piece = Piece("states", self._slots[number % self.SLOTS], self._lengths[number], "uint8")
        return self._tier.write([piece], step=0, kind="benchmark")


def end(job: Job) -> None:
    """Waits for it. Raises its error."""
    job.wait()
    if job.error is not None:
        raise job.error
