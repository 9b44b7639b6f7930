"""Optimizer states outlive whatever the drive does, and no wrong bytes come from it."""

from __future__ import annotations

import errno
import gc
import shutil

import pytest
import torch

from tests.optimizer.conftest import MakeRig
from tests.optimizer.rig import RECORD, SLOT, Rig, content
from tests.spill.faulty_files import NOTHING, SHORT
from tests.spilling import records_in
from tiered_mem.errors import Closed, CorruptRecord, TierFull
from tiered_mem.optimizer.bucket import Residence

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    pytest.mark.detector_only(why="takes long"),
]
EVER = float("inf")
WRITES = ("create", "pwrite", "allocate", "truncate")  # reads too look at a file, and close it
FAULTS = [
    *((operation, how) for operation in WRITES for how in (errno.ENOSPC, errno.EIO)),
    ("pwrite", NOTHING),
]


def steps(rig: Rig, buckets: list[Residence]) -> None:
    """One step of the optimizer over all buckets."""
    for bucket, coming in zip(buckets, [*buckets[1:], None], strict=True):
        if coming is not None:
            coming.fetch()
        rig.step(bucket)
        rig.progress()


def try_again(rig: Rig) -> None:
    """The pause after a failure is over."""
    rig.clock.now += 100
    rig.settle()


def right(rig: Rig, buckets: list[Residence], count: int) -> bool:
    return all(rig.has(bucket, seed, steps=count) for seed, bucket in enumerate(buckets))


@pytest.mark.parametrize(("operation", "how"), FAULTS)
def test_a_write_that_fails_costs_no_number(operation: str, how: int, rig: Rig) -> None:
    buckets = rig.buckets(4)
    for count, skip in enumerate((0, 3), start=1):
        rig.files.fail(operation, how, skip=skip)
        steps(rig, buckets)
        rig.files.heal()
        rig.clock.now += 100
        assert right(rig, buckets, count)
    try_again(rig)
    assert (rig.shelf.kept, rig.shelf.slots.count, rig.disk.stats().records) == (0, 2, 4)
    assert rig.in_use() == 2 * SLOT


@pytest.mark.parametrize("how", [errno.ENOSPC, errno.EIO])
def test_what_the_disk_does_not_take_stays_on_the_host(how: int, rig: Rig) -> None:
    buckets = rig.buckets(5)
    rig.files.fail("pwrite", how, times=EVER)
    for _ in range(3):
        steps(rig, buckets)
    rig.settle()
    assert rig.shelf.kept == 5
    assert rig.shelf.slots.count == 5, "one for each bucket, and no more"
    assert right(rig, buckets, 3)
    rig.files.heal()
    steps(rig, buckets)
    rig.settle()
    assert rig.shelf.kept == 5, "it is left alone for a while"
    try_again(rig)
    assert (rig.shelf.kept, rig.shelf.slots.count, rig.disk.stats().records) == (0, 2, 5)
    assert rig.in_use() == 2 * SLOT
    assert right(rig, buckets, 4)


def test_short_transfers_go_on(rig: Rig) -> None:
    (bucket,) = rig.buckets(1)
    rig.files.fail("pread", SHORT, skip=1, times=3)
    rig.files.fail("pwrite", SHORT, times=3)
    rig.step(bucket)
    rig.settle()
    assert sorted(rig.files.failed) == ["pread"] * 3 + ["pwrite"] * 3
    assert rig.disk.stats().failures == 0
    assert rig.has(bucket, 0, steps=1)


@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize(
    ("operation", "how", "error"),
    [("pread", errno.EIO, OSError), ("pread", NOTHING, CorruptRecord), ("open", errno.EIO, OSError)],
)
def test_a_read_that_fails_can_be_tried_again(
    operation: str, how: int, error: type[Exception], fetched: bool, rig: Rig
) -> None:
    first, second, third = rig.buckets(3)
    rig.files.fail(operation, how, times=EVER)
    if fetched:
        first.fetch()
        rig.drain()
    for call in (first.take, first.take, first.copy_out):
        with pytest.raises(error):
            call()
    rig.files.heal()
    second.take()
    third.take()
    assert rig.shelf.slots.count == 2, "the slot is free"
    second.leave(None)
    third.leave(None)
    assert rig.has(first, 0)


def test_a_read_that_fails_does_not_matter_where_the_bytes_are_not_needed(rig: Rig) -> None:
    (bucket,) = rig.buckets(1)
    rig.files.fail("pread", times=EVER)
    bucket.fetch()
    rig.fill(bucket, 7)
    rig.files.heal()
    rig.settle()
    assert rig.has(bucket, 7)


@pytest.fixture
def damaged(rig: Rig) -> list[Residence]:
    buckets = rig.buckets(3)
    for path in records_in(rig.folder):
        with path.open("r+b") as file:
            file.seek(-5000, 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
    return buckets


def test_a_record_that_was_changed_is_refused(rig: Rig, damaged: list[Residence]) -> None:
    for _ in range(2):
        for bucket in damaged:
            with pytest.raises(CorruptRecord):
                bucket.take()
    for seed, bucket in enumerate(damaged):
        rig.fill(bucket, seed)
    rig.settle()
    assert right(rig, damaged, 0)
    assert rig.shelf.slots.count == 2


def test_a_failed_read_leaves_no_cycle(rig: Rig, damaged: list[Residence]) -> None:
    bucket = damaged[0]
    gc.collect()
    for _ in range(3):
        with pytest.raises(CorruptRecord):
            bucket.take()
    assert not [found for found in gc.get_objects() if isinstance(found, CorruptRecord)]


def test_a_directory_that_vanishes(rig: Rig) -> None:
    buckets = rig.buckets(3)
    rig.fill(buckets[0], 9)
    for path in rig.folder.iterdir():
        shutil.rmtree(path)
    for bucket in buckets[1:]:
        with pytest.raises((CorruptRecord, OSError)):
            bucket.take()
    for seed, bucket in enumerate(buckets):
        rig.fill(bucket, seed)
    for count in range(1, 3):
        steps(rig, buckets)
        assert right(rig, buckets, count)
    try_again(rig)
    assert rig.shelf.kept == 3, "there is nowhere to write to"


def test_a_disk_that_the_buckets_just_fit(make_rig: MakeRig) -> None:
    """There is no room for a bucket's new record beside its old one, which goes when the host has all bytes."""
    rig = make_rig(capacity=4 * RECORD)
    buckets = rig.buckets(4)
    for _ in range(3):
        steps(rig, buckets)
        rig.settle()
    assert right(rig, buckets, 3)
    rig.settle()
    assert (rig.shelf.kept, rig.shelf.slots.count, rig.disk.stats().records) == (0, 2, 4)


def test_a_disk_that_not_all_buckets_fit(make_rig: MakeRig) -> None:
    rig = make_rig(capacity=2 * RECORD)
    buckets = rig.buckets(5)
    for count in range(1, 4):
        steps(rig, buckets)
        assert right(rig, buckets, count)
    rig.settle()
    assert rig.shelf.kept == 3
    assert rig.shelf.slots.count <= 5


def test_no_host_memory_for_what_the_disk_does_not_take(make_rig: MakeRig) -> None:
    rig = make_rig(host_slots=3)
    buckets = rig.buckets(4)
    rig.files.fail("pwrite", errno.EIO, times=EVER)
    for seed, bucket in enumerate(buckets[:3]):
        rig.fill(bucket, seed)
    rig.settle()
    words = r"fill 3 such slots and the disk takes nothing \(.*Input/output"
    for _ in range(2):
        with pytest.raises(TierFull, match=words) as caught:
            buckets[3].take()
        error = caught.value
        assert (error.needed, error.free, error.used, error.limit) == (SLOT, 0, 3 * SLOT, 3 * SLOT)
    assert rig.has(buckets[0], 0), "what is on the host is of use"
    rig.files.heal()
    try_again(rig)
    assert right(rig, buckets, 0)
    assert rig.shelf.slots.count == 2


def test_a_write_budget_that_is_spent(make_rig: MakeRig) -> None:
    rig = make_rig(budget=5 * RECORD)
    buckets = rig.buckets(4)
    for count in range(1, 4):
        steps(rig, buckets)
        assert right(rig, buckets, count)
    rig.settle()
    assert rig.shelf.kept >= 3
    assert rig.disk.stats().written <= 5 * RECORD


def test_a_disk_tier_that_is_closed(rig: Rig) -> None:
    first, second, third = rig.buckets(3)
    first.take()
    rig.close_disk()
    first.leave(None)
    second.fetch()
    for call in (second.take, second.copy_out):
        with pytest.raises(Closed):
            call()
    rig.fill(third, 5)
    rig.settle()
    assert rig.shelf.kept == 1
    assert torch.equal(third.copy_out(), content(5))
    for bucket in (first, second, third):
        bucket.drop()


def test_slots_that_the_host_has_no_room_for_are_not_there(make_rig: MakeRig) -> None:
    rig = make_rig(host_slots=2, slots=3)
    with pytest.raises(TierFull, match="3 slots are for optimizer states"):
        rig.on_disk()
    assert rig.in_use() == 0
    assert rig.host.slots == 0
