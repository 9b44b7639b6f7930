"""What every residence of optimizer states does, on the host or on disk."""

from __future__ import annotations

import weakref

import pytest
import torch

from tests.conftest import Link
from tests.optimizer.conftest import MakeRig
from tests.optimizer.rig import NBYTES, SLOT, Rig, content
from tiered_mem.errors import Closed, TierFull
from tiered_mem.optimizer.bucket import Residence

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    pytest.mark.detector_only(why="takes long"),
]
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
    for out_of_turn in (lambda: residence.take(blank=True), residence.copy_out, residence.drop):
        with pytest.raises(RuntimeError, match="leave comes first"):
            out_of_turn()
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


def test_nothing_comes_after_release(rig: Rig, residence: Residence) -> None:
    rig.fill(residence, 1)
    residence.drop()
    residence.drop()
    residence.fetch()
    for late in (residence.take, residence.copy_out):
        with pytest.raises(Closed):
            late()
    assert residence.ticket is None


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_memory_that_a_copy_fills_is_not_used_again_before_it_ended(
    make_rig: MakeRig, kind: str, link: Link
) -> None:
    rig = make_rig(host_slots=1, slots=1)
    residence = rig.make(kind)
    link(d2h=SLOW)
    copied = rig.fill(residence, 1).event
    residence.drop()
    assert not copied.query()
    assert rig.in_use() == SLOT
    with pytest.raises(TierFull):
        rig.make(kind)


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
    residence.drop()
    assert rig.in_use() == SLOT
    with pytest.raises(TierFull):
        rig.make(kind)
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


def test_there_is_an_end_to_what_is_waited_for(rig: Rig, residence: Residence) -> None:
    rig.fill(residence, 1)
    assert not all(residence._shelf.wait() for _ in range(10))
    assert rig.has(residence, 1)


def test_a_residence_that_is_forgotten_leaves_no_cycle(rig: Rig, kind: str) -> None:
    residence = rig.make(kind)
    rig._residences.clear()
    rig.fill(residence, 1)
    rig.look(residence)
    alive = weakref.ref(residence)
    shelf, parcel = residence._shelf, residence._parcel
    del residence
    assert alive() is None
    shelf.drop(parcel)


def test_what_is_released_is_free(rig: Rig, kind: str) -> None:
    """Slots and records are back as soon as every residence is released, and nothing is under way."""
    buckets = [rig.make(kind) for _ in range(3)]
    for bucket in buckets:
        rig.fill(bucket, 1)
        bucket.drop()
    rig.engine.synchronize()
    assert rig.disk.stats().records == 0
    assert rig.in_use() == 0
