"""Writes, reads, releases, faults and pauses in any order, several at a time."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from tests.spill.disks import BLOCK, Disk, disk_in
from tests.spill.faulty_files import NOTHING, SHORT, FaultyFiles
from tests.spill.memory import Memory, noise
from tiered_mem.allocators.base import round_up
from tiered_mem.errors import TierFull
from tiered_mem.spill.disk_tier import DiskRecord
from tiered_mem.spill.lower_tier import Job

CAPACITY = 40 * BLOCK
BUDGET = 400 * BLOCK
STEPS = 150
ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES)
COUNTS = (errno.EIO, errno.ENOSPC, SHORT, NOTHING)
FAULTS = {name: ERRORS for name in ("create", "open", "allocate", "truncate", "stat", "sync", "close", "remove")}
FAULTS |= {"pread": COUNTS, "pwrite": COUNTS}


class Walk:
    """One random history. What is under way is waited for by `finish` alone."""

    def __init__(self, disk: Disk, numbers: random.Random, budget: int | None, *, faults: bool) -> None:
        self._disk = disk
        self._numbers = numbers
        self._budget = budget
        self._writing: list[tuple[DiskRecord, list[Memory], list[bytes]]] = []
        self._written: list[tuple[DiskRecord, list[bytes]]] = []
        self._reading: list[tuple[Job, list[Memory], list[bytes]]] = []
        self._given_up: list[tuple[DiskRecord, list[Memory]]] = []
        self._steps = [self._write] * 6 + [self._read] * 4 + [self._release] * 4
        self._steps += [self._release_early, self._let_time_pass, self.finish]
        if faults:
            self._steps += [self._break_something] * 2

    def step(self) -> None:
        self._numbers.choice(self._steps)()
        stats = self._disk.tier.stats()
        assert self._disk.real_bytes() <= CAPACITY
        assert stats.used <= CAPACITY
        assert stats.reserved <= CAPACITY
        assert self._budget is None or stats.written <= self._budget

    def finish(self) -> None:
        for record, _memory in self._given_up:
            record.job.wait()
        self._given_up.clear()
        for record, _memory, contents in self._writing:
            record.job.wait()
            if record.job.error is None:
                self._written.append((record, contents))
            else:
                assert isinstance(record.job.error, OSError | TierFull), record.job.error
                assert self._disk.files.failed
                self._disk.tier.release(record)
        self._writing.clear()
        for job, memory, contents in self._reading:
            job.wait()
            if job.error is None:
                assert [part.content for part in memory] == contents
            else:
                assert isinstance(job.error, OSError), job.error
                assert self._disk.files.failed
        self._reading.clear()
        stats = self._disk.tier.stats()
        assert stats.used == sum(record.nbytes for record, _ in self._written)
        assert stats.records == len(self._written)
        assert self._disk.real_bytes() <= stats.reserved
        if not self._disk.files.failed:
            assert self._disk.real_bytes() == stats.reserved
            assert len(self._disk.paths()) == stats.files

    def check_all(self) -> None:
        for record, contents in self._written:
            assert self._disk.get(record) == contents

    def _write(self) -> None:
        sizes = [self._size() for _ in range(self._numbers.randint(1, 3))]
        contents = [noise(size, self._numbers.getrandbits(32)) for size in sizes]
        alone = not (self._writing or self._reading or self._given_up)
        accepted = self._disk.tier.accepts(sum(map(round_up, sizes)))
        try:
            record, memory = self._disk.write(*contents)
        except TierFull:
            assert not accepted or not alone
        else:
            assert accepted or not alone
            self._writing.append((record, memory, contents))

    def _read(self) -> None:
        if self._written:
            record, contents = self._numbers.choice(self._written)
            job, memory = self._disk.read(record)
            self._reading.append((job, memory, contents))

    def _release(self) -> None:
        if self._written:
            record, _ = self._written.pop(self._numbers.randrange(len(self._written)))
            self._disk.tier.release(record)

    def _release_early(self) -> None:
        if self._writing:
            record, memory, _ = self._writing.pop(self._numbers.randrange(len(self._writing)))
            self._disk.tier.release(record)
            self._given_up.append((record, memory))

    def _break_something(self) -> None:
        operation = self._numbers.choice(sorted(FAULTS))
        how = self._numbers.choice(FAULTS[operation])
        self._disk.files.fail(operation, how, skip=self._numbers.randrange(4), times=self._numbers.randint(1, 3))

    def _let_time_pass(self) -> None:
        self._disk.clock.now += self._numbers.choice((0.5, 1, 2, 60))

    def _size(self) -> int:
        blocks = self._numbers.randint(0, 8)
        return blocks * BLOCK + (self._numbers.randrange(BLOCK) if self._numbers.random() < 0.3 else 0)


more_seeds = pytest.mark.slow(why="more of the same kind")


@pytest.mark.parametrize("faults", [True, False], ids=["faults", "no faults"])
@pytest.mark.parametrize("takes_direct", [True, False], ids=["direct", "cached"])
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=more_seeds) for seed in range(3, 8))])
def test_any_history_keeps_every_byte(
    tmp_path: Path, seed: int, workers: int, takes_direct: bool, faults: bool
) -> None:
    budget = BUDGET if seed % 2 else None
    files = FaultyFiles(takes_direct=takes_direct)
    with disk_in(tmp_path, capacity=CAPACITY, files=files, workers=workers, write_budget=budget) as disk:
        walk = Walk(disk, random.Random(seed), budget, faults=faults)
        for _ in range(STEPS):
            walk.step()
        files.heal()
        walk.finish()
        walk.check_all()
