"""What every residence of optimizer states does, on the host or on disk."""

from __future__ import annotations

import weakref

import pytest
import torch

from tests.conftest import Link
from tests.optimizer.conftest import MakeRig
from tests.optimizer.rig import NBYTES, SLOT, Rig, content
from tiered_mem.errors import Closed, TierFull
from tiered_mem.optimizer.disk_residence import DiskResidence, Staging
from tiered_mem.optimizer.residence import Residence

pytestmark = pytest.mark.usefixtures("no_gc")
SLOW = "1MB/s"  # a fifth of a second for a copy


@pytest.fixture(params=["host", "disk"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def residence(rig: Rig, kind: str) -> Residence:
    return rig.make(kind)


def test_bytes_come_back_as_they_left(rig: Rig, residence: Residence) -> None:
    rig.fill(residence, 1)
    assert rig.has(residence, 1)
    assert rig.has(residence, 1), "looking changes nothing"
    rig.fill(residence, 2)
    assert rig.has(residence, 2)


def test_steps_follow_each_other(rig: Rig, residence: Residence) -> None:
    rig.fill(residence, 0)
    seen = []
    for _ in range(5):
        residence.fetch()
        seen.append(rig.step(residence))
        rig.progress()
    for steps, before in enumerate(seen):
        assert torch.equal(before.cpu(), content(0) + steps)
    assert rig.has(residence, 0, steps=5)


def test_buckets_keep_out_of_each_others_way(rig: Rig, kind: str) -> None:
    buckets = [rig.make(kind) for _ in range(5)]
    for seed, bucket in enumerate(buckets):
        rig.fill(bucket, seed)
    for _ in range(3):
        for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
            if following is not None:
                following.fetch()
            rig.step(bucket)
            rig.progress()
    assert all(rig.has(bucket, seed, steps=3) for seed, bucket in enumerate(buckets))


def test_the_slot_is_bytes_as_many_as_asked_for(residence: Residence) -> None:
    slot = residence.take(blank=True)
    assert (slot.tensor.dtype, slot.tensor.shape) == (torch.uint8, (NBYTES,))
    assert residence.nbytes == NBYTES
    assert slot.tensor.data_ptr() % 4096 == 0
    residence.leave(None)


def test_a_reload_that_follows_at_once_has_the_new_bytes(rig: Rig, residence: Residence, link: Link) -> None:
    rig.fill(residence, 1)
    assert rig.has(residence, 1)
    link(d2h=SLOW)
    rig.fill(residence, 2)
    assert residence.ticket is not None
    assert rig.has(residence, 2)


def test_a_residence_without_bytes(residence: Residence) -> None:
    residence.fetch()
    with pytest.raises(RuntimeError, match="no bytes yet"):
        residence.take()
    residence.take(blank=True)
    residence.leave(None)
    with pytest.raises(RuntimeError, match="no bytes yet"):
        residence.copy_out()


def test_turns_are_kept(residence: Residence) -> None:
    with pytest.raises(RuntimeError, match="take comes before leave"):
        residence.leave(None)
    residence.take(blank=True)
    for out_of_turn in (lambda: residence.take(blank=True), residence.copy_out, residence.release):
        with pytest.raises(RuntimeError, match="leave comes first"):
            out_of_turn()
    with pytest.raises(RuntimeError, match="leave comes first"):
        residence.copy_in(content(0))
    residence.leave(None)


def test_blank_memory_that_nobody_filled_changes_nothing(rig: Rig, residence: Residence) -> None:
    rig.fill(residence, 1)
    residence.take(blank=True)
    residence.leave(None)
    assert rig.has(residence, 1)


def test_bytes_for_the_cpu(rig: Rig, residence: Residence, link: Link) -> None:
    rig.fill(residence, 1)
    link(d2h=SLOW)
    rig.fill(residence, 2)
    out = residence.copy_out()
    assert torch.equal(out, content(2)), "the copy was waited for"
    assert (out.dtype, out.shape, out.is_pinned()) == (torch.uint8, (NBYTES,), False)
    out.zero_()
    assert rig.has(residence, 2)


def test_bytes_from_the_cpu(rig: Rig, residence: Residence) -> None:
    residence.copy_in(content(1))
    assert torch.equal(residence.copy_out(), content(1))
    assert rig.has(residence, 1)
    source = content(2)
    residence.copy_in(source)
    source.zero_()
    assert rig.has(residence, 2)
    rig.step(residence)
    assert torch.equal(residence.copy_out(), content(2) + 1)


def test_bytes_from_the_cpu_wait_for_who_reads_the_old_ones(rig: Rig, residence: Residence, link: Link) -> None:
    rig.fill(residence, 1)
    link(h2d=SLOW)
    before = rig.look(residence)
    residence.copy_in(content(2))
    assert torch.equal(before.cpu(), content(1))
    assert rig.has(residence, 2)


def test_bytes_from_the_cpu_come_after_the_copy_that_fills(rig: Rig, residence: Residence, link: Link) -> None:
    link(d2h=SLOW)
    rig.fill(residence, 1)
    residence.copy_in(content(2))
    assert torch.equal(residence.copy_out(), content(2))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (torch.zeros(NBYTES // 4), "float32"),
        (torch.zeros(NBYTES + 1, dtype=torch.uint8), r"\(200002,\)"),
        (torch.zeros(1, NBYTES, dtype=torch.uint8), r"\(1, 200001\)"),
        (torch.zeros(NBYTES, dtype=torch.uint8, device="meta"), "on meta"),
    ],
)
def test_bytes_that_do_not_fit(wrong: torch.Tensor, words: str, rig: Rig, residence: Residence) -> None:
    rig.fill(residence, 1)
    with pytest.raises(ValueError, match=words):
        residence.copy_in(wrong)
    assert rig.has(residence, 1)


def test_nothing_comes_after_release(rig: Rig, residence: Residence) -> None:
    rig.fill(residence, 1)
    residence.release()
    residence.release()
    residence.fetch()
    for late in (residence.take, residence.copy_out):
        with pytest.raises(Closed):
            late()
    with pytest.raises(Closed):
        residence.copy_in(content(0))
    assert residence.ticket is None


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_memory_that_a_copy_fills_is_not_used_again_before_it_ended(
    make_rig: MakeRig, kind: str, link: Link
) -> None:
    rig = make_rig(host_slots=1, slots=1)
    residence = rig.make(kind)
    link(d2h=SLOW)
    copied = rig.fill(residence, 1).event
    residence.release()
    assert not copied.query()
    assert rig.in_use() == SLOT
    if kind == "host":
        with pytest.raises(TierFull):
            rig.make(kind)
    else:
        rig.make(kind).take(blank=True)
        assert copied.query(), "the only slot was waited for"
        rig._residences[-1].leave(None)


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_memory_that_a_copy_reads_is_not_used_again_before_it_ended(
    make_rig: MakeRig, kind: str, link: Link
) -> None:
    rig = make_rig(host_slots=1, slots=1)
    residence = rig.make(kind)
    rig.fill(residence, 1)
    rig.progress()
    link(h2d=SLOW)
    read = rig.look(residence)
    residence.release()
    if kind == "host":
        assert rig.in_use() == SLOT
        with pytest.raises(TierFull):
            rig.make(kind)
    else:
        rig.make(kind).copy_in(content(2))
    assert torch.equal(read.cpu(), content(1))


def test_no_room_on_the_host(make_rig: MakeRig, kind: str) -> None:
    rig = make_rig(host_slots=2, slots=3)
    if kind == "host":
        rig.make(kind), rig.make(kind)
    with pytest.raises(TierFull, match="optimizer states") as caught:
        rig.make(kind)
    error = caught.value
    assert (error.needed, error.free, error.used, error.limit) == (SLOT, 0, 2 * SLOT, 2 * SLOT)
    assert rig.in_use() == (2 * SLOT if kind == "host" else 0), "what there was is given back"


def test_a_residence_that_is_forgotten_leaves_no_cycle(rig: Rig, kind: str) -> None:
    residence = rig.make(kind)
    rig._residences.clear()
    rig.fill(residence, 1)
    rig.look(residence)
    alive = weakref.ref(residence)
    keep = residence._home if isinstance(residence, DiskResidence) else residence._slot
    del residence
    assert alive() is None
    if kind == "disk":
        rig.staging.drain()
        rig.staging.release(keep)  # type: ignore[arg-type]
    else:
        with rig.exclusive:
            rig.host.release(keep, None)  # type: ignore[arg-type]


def test_what_is_released_is_free(rig: Rig, kind: str) -> None:
    """Slots and records are back as soon as every residence is released, and nothing is under way."""
    buckets = [rig.make(kind) for _ in range(3)]
    for bucket in buckets:
        rig.fill(bucket, 1)
        bucket.release()
    rig.engine.synchronize()
    if kind == "disk":
        rig.staging.drain()
        assert rig.disk.stats().records == 0
    assert rig.in_use() == (0 if kind == "host" else 2 * SLOT)


def test_a_staging_needs_slots(rig: Rig) -> None:
    for slot_bytes, slots in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="below 1"):
            Staging(rig.host, rig.disk, rig.exclusive, slot_bytes, slots)
    for nbytes in (0, NBYTES + 1):
        with pytest.raises(ValueError, match=f"bucket has {nbytes} bytes"):
            DiskResidence(rig.staging, nbytes, "bucket")
