"""Buckets are filled, looked at, fetched, given up and refused in any order."""

from __future__ import annotations

import contextlib
import errno
import itertools
import random

import pytest
import torch

from tests.optimizer.conftest import MakeRig
from tests.optimizer.rig import RECORD, SLOT, Rig, content
from tests.spill.faulty_files import NOTHING, SHORT
from tiered_mem.errors import TierFull
from tiered_mem.optimizer.bucket import Residence

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    pytest.mark.detector_only(why="takes long"),
]
BUCKETS = 6
STEPS = 120
FAULTS = [
    (operation, how)
    for operation in ("create", "open", "pread", "pwrite", "allocate", "truncate", "stat", "close", "remove")
    for how in (errno.EIO, errno.ENOSPC, SHORT, NOTHING)
    if how > 0 or operation in ("pread", "pwrite")
]


class Walk:
    """One random history. Each bucket has the bytes of a seed, plus the number of steps that it has made."""

    def __init__(self, rig: Rig, numbers: random.Random) -> None:
        self._rig = rig
        self._numbers = numbers
        self._buckets = {bucket: content(seed) for seed, bucket in enumerate(rig.buckets(BUCKETS))}
        self.failed = 0
        self._looks: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._seeds = itertools.count(BUCKETS)
        self._do = [self._fill, self._step, self._step, self._look, self._fill, self._copy_out]
        self._do += [self._fetch, self._fetch, self._blank, self._release, self._fault, self._heal]
        self._do += [rig.progress, rig.progress, rig.settle]

    def go(self, count: int) -> None:
        for _ in range(count):
            try:
                self._numbers.choice(self._do)()
            except (OSError, TierFull):
                self.failed += 1  # and nothing has changed
            assert self._rig.shelf.slots.count <= BUCKETS + 2
        self._heal()
        for bucket, expected in self._buckets.items():
            with contextlib.suppress(OSError):
                bucket.copy_out()  # a read that was begun before may have failed
            assert torch.equal(self._rig.look(bucket).cpu(), expected)
        for found, expected in self._looks:
            assert torch.equal(found.cpu(), expected)
        self._rig.drain()
        assert (self._rig.shelf.kept, self._rig.shelf.slots.count) == (0, 2)
        assert self._rig.in_use() == 2 * SLOT
        assert self._rig.disk.stats().records == BUCKETS

    def _any(self) -> Residence:
        return self._numbers.choice(list(self._buckets))

    def _fill(self) -> None:
        bucket, seed = self._any(), next(self._seeds)
        self._rig.fill(bucket, seed)
        self._buckets[bucket] = content(seed)

    def _step(self) -> None:
        bucket = self._any()
        self._looks.append((self._rig.step(bucket), self._buckets[bucket]))
        self._buckets[bucket] = self._buckets[bucket] + 1

    def _look(self) -> None:
        bucket = self._any()
        self._looks.append((self._rig.look(bucket), self._buckets[bucket]))

    def _copy_out(self) -> None:
        bucket = self._any()
        assert torch.equal(bucket.copy_out(), self._buckets[bucket])

    def _fetch(self) -> None:
        self._any().fetch()

    def _blank(self) -> None:
        bucket = self._any()
        bucket.take(blank=True)
        bucket.leave(None)

    def _release(self) -> None:
        bucket, seed = self._any(), next(self._seeds)
        del self._buckets[bucket]
        bucket.drop()
        new = self._rig.on_disk()
        self._buckets[new] = content(seed)
        self._heal()
        self._rig.fill(new, seed)

    def _fault(self) -> None:
        self._rig.files.fail(*self._numbers.choice(FAULTS), skip=self._numbers.randrange(3), times=2)

    def _heal(self) -> None:
        self._rig.files.heal()
        self._rig.clock.now += 100


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("records", [20, BUCKETS + 1])
def test_any_history(records: int, seed: int, make_rig: MakeRig) -> None:
    rig = make_rig(host_slots=BUCKETS + 2, capacity=records * RECORD)
    Walk(rig, random.Random(seed)).go(STEPS)
