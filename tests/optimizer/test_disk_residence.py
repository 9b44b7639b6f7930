"""Buckets of optimizer states that pass through a few host slots on their way to disk and back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.conftest import Link
from tests.optimizer.conftest import MakeRig, MakeTiered
from tests.optimizer.rig import NBYTES, RECORD, SLOT, Rig, content
from tests.optimizer.training import make_params
from tests.spill.faulty_files import FaultyFiles
from tests.spilling import records_in
from tiered_mem import TieringManager
from tiered_mem.errors import Closed, TierFull
from tiered_mem.spill.disk_tier import DiskTier
from tiered_mem.spill.reader import read_header, read_record
from tiered_mem.tiers.host_tier import flat_form

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    pytest.mark.detector_only(why="takes long"),
]
SLOW = "1MB/s"  # a fifth of a second for a copy


def contents_on_disk(rig: Rig) -> list[bytes]:
    return [array.tobytes() for path in records_in(rig.folder) for array in read_record(path).values()]


def begin_writes(rig: Rig) -> None:
    """The copies have ended, and the writes that follow them begin."""
    rig.engine.synchronize()
    rig.progress()


def in_a_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_many_buckets_pass_through_few_slots(slots: int, make_rig: MakeRig) -> None:
    rig = make_rig(slots=slots, host_slots=slots)
    buckets = rig.buckets(7)
    for _ in range(3):
        for number, bucket in enumerate(buckets):
            for coming in buckets[number + 1 : number + slots]:
                coming.fetch()
            rig.step(bucket)
            rig.progress()
    assert all(rig.has(bucket, seed, steps=3) for seed, bucket in enumerate(buckets))
    rig.drain()
    assert rig.shelf.slots.count == slots
    assert rig.stats().peak == slots * SLOT
    assert (rig.disk.stats().records, rig.disk.stats().used) == (7, 7 * RECORD)


def test_a_record_says_what_is_in_it(rig: Rig) -> None:
    rig.shelf.step = 12
    rig.buckets(1)
    (path,) = records_in(rig.folder)
    header = read_header(path)
    assert (header.kind, header.step) == ("optimizer", 12)
    assert [(entry.name, entry.nbytes, entry.dtype) for entry in header.entries] == [("bucket.0", NBYTES, "uint8")]
    assert contents_on_disk(rig) == [content(0).numpy().tobytes()]


def test_a_record_says_of_which_step_it_is(device: str, tmp_path: Path, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    tiered = make_tiered(torch.optim.AdamW(params), residency="disk")
    for param in params:
        param.grad = torch.ones_like(param)
    for step in range(3):
        tiered.step()
        make_tiered.manager.synchronize()
        assert max(read_header(path).step for path in records_in(tmp_path)) == step + 1


def test_synchronize_waits_for_states_that_are_written(device: str, tmp_path: Path) -> None:
    files = FaultyFiles()
    params = make_params(device)
    disk = DiskTier(tmp_path, capacity=16 << 20, files=files)
    with TieringManager(policy="lru", device=device, host_bytes="8MiB", disk=disk) as manager:
        tiered = manager.register_optimizer(torch.optim.AdamW(params), residency="disk")
        with files.hold("pwrite") as hold:
            for param in params:
                param.grad = torch.ones_like(param)
            tiered.step()
            waiting = in_a_thread(manager.synchronize)
            assert hold.reached.wait(60)
            waiting.join(0.2)  # where it did not wait, it would be through
            assert waiting.is_alive()
        waiting.join(60)
        assert max(read_header(path).step for path in records_in(tmp_path)) == 1


def test_what_was_not_changed_is_not_written_back(rig: Rig) -> None:
    buckets = rig.buckets(3)
    written = rig.disk.stats().written
    assert written > 0
    for seed, bucket in enumerate(buckets):
        bucket.fetch()
        assert rig.has(bucket, seed)
        assert torch.equal(bucket.copy_out(), content(seed))
        bucket.take(blank=True)
        bucket.leave(None)
    rig.drain()
    assert rig.disk.stats().written == written


def test_what_was_changed_before_is_written_though_the_last_look_changed_nothing(rig: Rig) -> None:
    bucket = rig.on_disk()
    rig.fill(bucket, 1)
    assert rig.has(bucket, 1)
    rig.settle()
    assert rig.disk.stats().records == 1
    assert contents_on_disk(rig) == [content(1).numpy().tobytes()]


def test_fetched_bytes_are_read_once(rig: Rig) -> None:
    bucket, other = rig.buckets(2)
    bucket.fetch()
    before = rig.disk.stats().read
    bucket.fetch()
    assert rig.has(bucket, 0)
    once = rig.disk.stats().read
    assert rig.has(other, 1)
    assert once + before <= rig.disk.stats().read, "which is one record each"
    assert rig.disk.stats().read <= 2 * RECORD


def test_no_more_is_fetched_than_there_are_slots(rig: Rig) -> None:
    buckets = rig.buckets(4)
    for bucket in buckets:
        bucket.fetch()
    rig.drain()
    assert 0 < rig.disk.stats().read <= 2 * RECORD


def test_a_bucket_that_is_needed_takes_the_slot_of_the_one_fetched_last(make_rig: MakeRig) -> None:
    rig = make_rig(host_slots=2)
    first, second, third = rig.buckets(3)
    first.fetch()
    second.fetch()
    assert rig.has(third, 2)
    read = rig.disk.stats().read
    assert rig.has(first, 0)
    assert rig.disk.stats().read == read, "it was not the first one's"
    assert rig.has(second, 1)


def test_a_slot_that_a_file_is_read_into_is_not_taken_before_the_read_has_ended(make_rig: MakeRig) -> None:
    rig = make_rig(slots=1)
    first, second = rig.buckets(2)
    with rig.files.hold("pread") as hold:
        first.fetch()
        assert hold.reached.wait(10)
        thread = in_a_thread(lambda: rig.fill(second, 5))
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(10)
    assert rig.has(second, 5)
    assert rig.has(first, 0)


def test_a_bucket_that_is_still_in_its_slot_is_not_read(rig: Rig, link: Link) -> None:
    bucket = rig.on_disk()
    link(d2h=SLOW)
    for seed in range(3):
        rig.fill(bucket, seed)
        assert bucket.ticket is not None
        assert rig.has(bucket, seed)
    rig.settle()
    assert (rig.disk.stats().read, rig.disk.stats().records) == (0, 1)


def test_a_bucket_that_is_taken_while_it_is_written(rig: Rig) -> None:
    """The write reads its slot, which is left alone until it ended. Then the record is as good as the slot."""
    (bucket,) = rig.buckets(1)
    rig.fill(bucket, 1)
    with rig.files.hold("pwrite") as hold, ThreadPoolExecutor(1) as pool:
        begin_writes(rig)
        assert hold.reached.wait(10)
        taken = pool.submit(bucket.take)
        assert not taken.done()
        hold.go_on.set()
        slot = taken.result(10)
    assert torch.equal(slot.tensor, content(1))
    assert contents_on_disk(rig).count(content(1).numpy().tobytes()) == 1
    bucket.leave(None)
    written = rig.disk.stats().written
    assert rig.has(bucket, 1)
    rig.settle()
    assert (rig.disk.stats().written, rig.disk.stats().records) == (written, 1)


def test_the_bytes_from_before_go_when_those_from_after_are_written(rig: Rig) -> None:
    (bucket,) = rig.buckets(1)
    before, after = (content(seed).numpy().tobytes() for seed in (0, 1))
    rig.fill(bucket, 1)
    assert contents_on_disk(rig) == [before]
    with rig.files.hold("pwrite") as hold:
        begin_writes(rig)
        assert hold.reached.wait(10)
        rig.progress()
        assert rig.disk.stats().records == 2
        (old, _unfinished) = records_in(rig.folder)
        assert read_record(old)["bucket.0"].tobytes() == before
    rig.settle()
    assert rig.disk.stats().records == 1
    assert after in contents_on_disk(rig)
    assert rig.has(bucket, 1)


def test_nothing_is_written_before_the_copy_has_ended(rig: Rig, link: Link) -> None:
    (bucket,) = rig.buckets(1)
    link(d2h=SLOW)
    for seed in range(1, 4):
        rig.fill(bucket, seed)
        rig.progress()
        rig.settle()
        assert content(seed).numpy().tobytes() in contents_on_disk(rig)


def test_a_slot_that_is_read_by_a_copy_is_not_read_into(make_rig: MakeRig, link: Link) -> None:
    rig = make_rig(slots=1)
    first, second = rig.buckets(2)
    link(h2d=SLOW)
    looks = [rig.look(bucket) for bucket in (first, second, first)]
    for look, seed in zip(looks, (0, 1, 0), strict=True):
        assert torch.equal(look.cpu(), content(seed))
    assert rig.shelf.slots.count == 1


def test_progress_and_fetch_do_not_wait(rig: Rig) -> None:
    first, second = rig.buckets(2)
    rig.fill(first, 5)
    with rig.files.hold("pwrite") as written, rig.files.hold("pread") as read:
        begin_writes(rig)
        assert written.reached.wait(10)
        second.fetch()
        rig.progress()
        assert rig.shelf.kept == 0
        written.go_on.set()
        assert read.reached.wait(10)
        rig.progress()
        second.fetch()
    assert rig.has(first, 5)
    assert rig.has(second, 1)


@pytest.mark.parametrize("operation", ["pread", "pwrite"])
def test_the_host_tier_is_free_for_others_while_a_bucket_waits(operation: str, make_rig: MakeRig) -> None:
    rig = make_rig(slots=1)
    first, second = rig.buckets(2)
    with rig.files.hold(operation) as hold:
        if operation == "pwrite":
            rig.fill(first, 5)
            begin_writes(rig)
        thread = in_a_thread(second.take)
        assert hold.reached.wait(10)
        with rig.exclusive:
            (slot,) = rig.host.reserve([flat_form(4096)])
            rig.host.release(slot, None)
        assert thread.is_alive()
    thread.join(10)
    second.leave(None)


@pytest.mark.parametrize("operation", ["pread", "pwrite"])
def test_a_slot_of_a_released_bucket_is_left_to_the_file(operation: str, make_rig: MakeRig) -> None:
    rig = make_rig(slots=1)
    (bucket,) = rig.buckets(1)
    other = rig.on_disk()
    with rig.files.hold(operation) as hold:
        if operation == "pread":
            bucket.fetch()
        else:
            rig.fill(bucket, 1)
            begin_writes(rig)
        assert hold.reached.wait(10)
        bucket.drop()
        other.fetch()
        thread = in_a_thread(lambda: rig.fill(other, 2))
        thread.join(0.1)
        assert thread.is_alive(), "there is no other slot"
        assert rig.in_use() == SLOT
    thread.join(10)
    assert rig.has(other, 2)
    rig.drain()
    assert rig.disk.stats().records == 1


def test_a_write_that_has_not_begun_is_not_made_for_a_released_bucket(rig: Rig) -> None:
    first, second = rig.on_disk(), rig.on_disk()
    with rig.files.hold("pwrite") as hold:
        rig.fill(first, 1)
        rig.fill(second, 2)
        begin_writes(rig)
        assert hold.reached.wait(10)
        second.drop()
        rig.progress()
        third = rig.on_disk()
        rig.fill(third, 3)
    rig.settle()
    assert sorted(contents_on_disk(rig)) == sorted(content(seed).numpy().tobytes() for seed in (1, 3))


def test_who_takes_more_than_there_are_slots_gets_further_ones(rig: Rig) -> None:
    buckets = rig.buckets(4)
    slots = [bucket.take() for bucket in buckets]
    assert rig.shelf.slots.count == 4
    for seed, (bucket, slot) in enumerate(zip(buckets, slots, strict=True)):
        assert torch.equal(slot.tensor, content(seed))
        bucket.leave(None)
    assert rig.shelf.slots.count == 2
    assert rig.in_use() == 2 * SLOT


def test_no_room_for_a_further_slot(make_rig: MakeRig) -> None:
    rig = make_rig(host_slots=2)
    first, second, third = rig.buckets(3)
    first.take()
    second.take()
    with pytest.raises(TierFull, match="optimizer states fill 2 such slots; raise host_bytes") as caught:
        third.take()
    error = caught.value
    assert (error.needed, error.free, error.used, error.limit) == (SLOT, 0, 2 * SLOT, 2 * SLOT)
    first.leave(None)
    assert rig.has(third, 2)
    second.leave(None)


def test_a_slot_of_a_released_bucket_is_left_to_the_copy(make_rig: MakeRig, link: Link) -> None:
    rig = make_rig(slots=1)
    buckets = [rig.on_disk() for _ in range(3)]
    link(d2h=SLOW)
    copied = rig.fill(buckets[0], 1).event
    buckets[0].drop()
    rig.fill(buckets[1], 2)
    assert copied.query(), "the only slot was waited for"
    link(d2h=None, h2d=SLOW)
    rig.settle()
    read = rig.look(buckets[1])
    buckets[1].drop()
    rig.fill(buckets[2], 3)
    assert torch.equal(read.cpu(), content(2))
    assert rig.has(buckets[2], 3)
    assert rig.shelf.slots.count == 1


def test_the_last_release_waits_for_files_and_gives_all_slots_back(rig: Rig) -> None:
    first, second, third = rig.buckets(3)
    with rig.files.hold("pwrite") as hold:
        rig.fill(first, 4)
        begin_writes(rig)
        assert hold.reached.wait(10)
        second.fetch()
        first.drop()
        second.drop()
        assert rig.in_use() == 2 * SLOT
        thread = in_a_thread(third.drop)
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(10)
    assert (rig.in_use(), rig.disk.stats().records) == (0, 0)
    for bucket in (first, second, third):
        bucket.fetch()
        with pytest.raises(Closed):
            bucket.take()


def test_close_with_a_slot_that_is_taken(rig: Rig) -> None:
    first, second = rig.buckets(2)
    first.take()
    rig.shelf.close()
    assert rig.in_use() == 0
    first.drop()
    second.drop()
    assert rig.disk.stats().records == 0
