"""Several drives as one tier: which one a record goes to, and what becomes of it where one fails or is full."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch

from tests.modelled.slow_drive import SlowDrive, SlowOperation
from tests.models import eventually, is_empty
from tests.optimizer.training import OPTIMIZERS, make_params, train
from tests.spill.disks import BLOCK, MIB, Clock, drives_in, io_threads
from tests.spill.faulty_files import FaultyFiles
from tests.spill.memory import Memory, empty, noise
from tests.spilling import Training
from tests.tiers.lower_tier_contract import contents, ended, written
from tiered_mem import SpillDirRefused, TierFull, TieringManager
from tiered_mem.policies import LRUPolicy
from tiered_mem.spill import chosen
from tiered_mem.spill.chosen import tier_in
from tiered_mem.spill.several_drives import PlacedRecord, SeveralDrives


@dataclass
class EvenDrive(SlowDrive):
    """Each byte takes it a second, whatever this machine does meanwhile."""

    def submit(self, nbytes: int, *, read: bool) -> SlowOperation:
        operation = super().submit(nbytes, read=read)
        self.seconds += nbytes
        operation.end(self.seconds - nbytes, self.seconds)
        return operation


def folders(tmp_path: Path, count: int = 2) -> list[Path]:
    paths = [tmp_path / f"drive-{number}" for number in range(count)]
    for path in paths:
        path.mkdir()
    return paths


def begun(tier: SeveralDrives, memory: Memory) -> PlacedRecord:
    return tier.write([memory.piece()], step=0, kind="activation")


def counts(tmp_path: Path) -> list[int]:
    """The files of each drive."""
    paths = sorted(tmp_path.glob("drive-*"), key=lambda path: int(path.name.partition("-")[2]))
    return [len(list(path.rglob("*.safetensors"))) for path in paths]


@pytest.mark.parametrize("first", [0, 1])
def test_many_records_in_flight_are_on_all_drives(tmp_path: Path, first: int) -> None:
    files = [FaultyFiles(), FaultyFiles()]
    memory = [Memory(noise(BLOCK, seed)) for seed in range(6)]
    with closing(drives_in(tmp_path, files, first=first)) as tier:
        with files[0].hold("pwrite"), files[1].hold("pwrite"):
            records = [begun(tier, each) for each in memory]
            placed = [records[first].drive, records[1 - first].drive]
            assert [record.drive for record in records] == [records[0].drive, records[1].drive] * 3
            assert placed[0] is not placed[1]
        assert [ended(record.job) for record in records] == [None] * 6
        assert sorted(tmp_path.glob("drive-*/*/*/*.safetensors")) != []
        assert counts(tmp_path) == [3, 3]
    assert io_threads() == []


def test_a_busy_drive_leaves_what_comes_to_the_other(tmp_path: Path) -> None:
    files = [FaultyFiles(), FaultyFiles()]
    big, small = Memory(noise(4 * BLOCK)), [Memory(noise(BLOCK, seed)) for seed in range(3)]
    with closing(drives_in(tmp_path, files)) as tier, files[0].hold("pwrite"), files[1].hold("pwrite"):
        slow = begun(tier, big)
        assert all(begun(tier, each).drive is not slow.drive for each in small)


def test_a_drive_that_reads_is_busy_too(tmp_path: Path) -> None:
    """Though its records would be read back the soonest."""
    drives, back = [SlowDrive(), SlowDrive()], empty(BLOCK)
    with closing(drives_in(tmp_path, [FaultyFiles(), FaultyFiles()], drives=drives)) as tier:
        big, small = written(tier, noise(8 * BLOCK)), written(tier, noise(BLOCK))
        assert big.drive is not small.drive
        jobs = [tier.read(small, [(0, back.ptr)]) for _ in range(2)]
        assert begun(tier, Memory(noise(BLOCK))).drive is big.drive
        assert [ended(job) for job in jobs] == [None] * 2
        assert begun(tier, Memory(noise(BLOCK))).drive is small.drive


@pytest.mark.parametrize("how", [errno.EIO, errno.ENOSPC])
def test_one_drive_that_fails_is_told_once_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: int
) -> None:
    files = [FaultyFiles(), FaultyFiles()]
    with closing(drives_in(tmp_path, files)) as tier:
        files[0].fail("pwrite", how, times=float("inf"))
        memory = Memory(noise(BLOCK))
        first = begun(tier, memory)
        assert ended(first.job) is not None
        tier.release(first)
        for seed in range(8):
            assert tier.accepts(BLOCK)
            record = written(tier, noise(BLOCK, seed))
            assert record.drive is not first.drive
            assert contents(tier, record, (0, BLOCK)) == [noise(BLOCK, seed)]
        stats = tier.stats()
        assert (stats.records, stats.failures, stats.state, stats.drives) == (8, 1, "failing", 2)
        warnings = [each.message for each in caplog.records if each.levelno == logging.WARNING]
        assert [str(tmp_path / "drive-0") in each for each in warnings] == [True]


def test_a_drive_that_works_again_is_tried_with_one_record(tmp_path: Path) -> None:
    files, clock = [FaultyFiles(), FaultyFiles()], Clock()
    with closing(drives_in(tmp_path, files, clock=clock)) as tier:
        files[0].fail("pwrite")
        memory = [Memory(noise(BLOCK, seed)) for seed in range(5)]
        failed = begun(tier, memory[0])
        assert ended(failed.job) is not None
        clock.now = 1.5
        with files[0].hold("pwrite"), files[1].hold("pwrite"):
            assert [begun(tier, each).drive is failed.drive for each in memory[1:]].count(True) == 1


def test_a_drive_that_is_full_leaves_what_comes_to_the_other(tmp_path: Path) -> None:
    """The first has room for two records."""
    files, memory = [FaultyFiles(), FaultyFiles()], [Memory(noise(BLOCK, seed)) for seed in range(20)]
    with closing(drives_in(tmp_path, files, limits=[4 * BLOCK, 16 * MIB])) as tier:
        with files[0].hold("pwrite"), files[1].hold("pwrite"):
            records = [begun(tier, each) for each in memory]
        assert [ended(record.job) for record in records] == [None] * 20
        assert counts(tmp_path) == [2, 18]
        assert [contents(tier, record, (0, BLOCK)) for record in records] == [[noise(BLOCK, n)] for n in range(20)]
        assert (tier.stats().failures, tier.stats().state) == (0, "ok")


def test_idle_drives_get_what_can_be_read_back_the_soonest(tmp_path: Path) -> None:
    """One record after the other, and never one beside another."""
    drives = [SlowDrive(), SlowDrive()]
    with closing(drives_in(tmp_path, [FaultyFiles(), FaultyFiles()], drives=drives)) as tier:
        for number in range(8):
            before = [len(drive.operations) for drive in drives]
            record = begun(tier, memory := Memory(noise(BLOCK, number)))
            (used,) = [drive for drive, count in zip(drives, before, strict=True) if len(drive.operations) > count]
            used.operations[-1].end(number, number + (1 if used is drives[0] else 1.1))
            assert record.job.done
            del memory
        assert [len(drive.operations) for drive in drives] == [4, 4]


def test_a_record_that_is_given_up_is_no_burden(tmp_path: Path) -> None:
    drives = [SlowDrive(), SlowDrive()]
    with closing(drives_in(tmp_path, [FaultyFiles(), FaultyFiles()], drives=drives)) as tier:
        big, small = Memory(noise(8 * BLOCK)), [Memory(noise(BLOCK, seed)) for seed in range(4)]
        tier.release(begun(tier, big))
        records = [begun(tier, each) for each in small]
        assert [sum(not each.cancelled for each in drive.operations) for drive in drives] == [2, 2]
        assert [ended(record.job) for record in records] == [None] * 4


def test_a_slow_drive_gets_less(tmp_path: Path) -> None:
    """One that takes three times as long has a quarter of what is in flight."""
    drives = [SlowDrive(), SlowDrive()]
    with closing(drives_in(tmp_path, [FaultyFiles(), FaultyFiles()], drives=drives)) as tier:
        memory = [Memory(noise(BLOCK, seed)) for seed in range(42)]
        for number, each in enumerate(memory[:2]):
            record = begun(tier, each)
            drives[number].operations[0].end(0, 1 + 2 * number)
            assert record.job.done
        records = [begun(tier, each) for each in memory[2:]]
        assert [len(drive.operations) - 1 for drive in drives] == pytest.approx([30, 10], abs=1)
        assert [ended(record.job) for record in records] == [None] * 40


def test_drives_share_the_room(tmp_path: Path) -> None:
    """Free files of one drive make room for another one's records, too."""
    files = [FaultyFiles(), FaultyFiles()]
    with closing(drives_in(tmp_path, files, capacity=8 * BLOCK)) as tier:
        records = [written(tier, noise(BLOCK, seed)) for seed in range(4)]
        assert not tier.accepts(BLOCK)
        with pytest.raises(TierFull, match="no drive takes it"):
            begun(tier, Memory(noise(BLOCK)))
        for record in records:
            tier.release(record)
        big = written(tier, noise(6 * BLOCK))
        assert contents(tier, big, (0, 6 * BLOCK)) == [noise(6 * BLOCK)]
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) <= 8 * BLOCK


@pytest.mark.parametrize("seed", range(6))
def test_random_faults_lose_no_record(tmp_path: Path, seed: int) -> None:
    random, clock, files = Random(seed), Clock(), [FaultyFiles(), FaultyFiles(), FaultyFiles()]
    kept: dict[int, PlacedRecord] = {}
    with closing(drives_in(tmp_path, files, capacity=40 * BLOCK, clock=clock)) as tier:
        for number in range(150):
            if random.random() < 0.2:
                random.choice(files).fail(
                    "pwrite", random.choice([errno.EIO, errno.ENOSPC]), times=random.randint(1, 3)
                )
            clock.now += random.random()
            if kept and (random.random() < 0.4 or not tier.accepts(BLOCK)):
                old, record = (
                    kept.popitem() if random.random() < 0.5 else (first := next(iter(kept)), kept.pop(first))
                )
                assert contents(tier, record, (0, BLOCK)) == [noise(BLOCK, old)]
                tier.release(record)
                assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) <= 40 * BLOCK
            elif tier.accepts(BLOCK):
                memory = Memory(noise(BLOCK, number))
                record = begun(tier, memory)
                if ended(record.job) is None:
                    kept[number] = record
        stats = tier.stats()
        assert (stats.records, stats.drives) == (len(kept), 3)
        assert stats.used <= stats.peak <= stats.capacity
        for number, record in kept.items():
            assert contents(tier, record, (0, BLOCK)) == [noise(BLOCK, number)]


@pytest.mark.parametrize("broken", [(), (errno.EIO,), (errno.ENOSPC,)])
def test_a_training_goes_on_with_the_other_drive(
    tmp_path: Path, device: str, training: Training, broken: Sequence[int]
) -> None:
    files = [FaultyFiles(), FaultyFiles()]
    tier = drives_in(tmp_path, files, capacity=256 * MIB, drives=[EvenDrive(), EvenDrive()])
    with TieringManager(policy=LRUPolicy("8MiB"), device=device, host_bytes=4 * MIB, disk=tier) as manager:
        assert training.step(manager)
        assert min(counts(tmp_path)) > 0
        loss = training.forward(manager)
        for how in broken:
            files[1].fail("pwrite", how, times=float("inf"))
        loss.backward()
        assert training.is_right()
        assert training.step(manager)
        manager.synchronize()
        assert (tier.stats().failures > 0) == bool(broken)
        failed, before = len(files[1].named("pwrite")), tier.stats().written
        for _ in range(3):
            assert training.step(manager)
        assert eventually(lambda: is_empty(manager))
        assert (len(files[1].named("pwrite")) == failed) == bool(broken), "it is left alone"
        assert tier.stats().written > before
        assert manager.stats()["kept.blocks.total"] == 0
    assert io_threads() == []


@pytest.mark.parametrize("how", [errno.EIO, errno.ENOSPC])
def test_optimizer_states_go_on_with_the_other_drive(tmp_path: Path, device: str, how: int) -> None:
    plain = make_params(device)
    train(OPTIMIZERS["adamw"](plain), plain, range(8))
    files, params = [FaultyFiles(), FaultyFiles()], make_params(device)
    tier = drives_in(tmp_path, files, drives=[EvenDrive(), EvenDrive()])
    with TieringManager(policy="lru", device=device, host_bytes="1MiB", disk=tier) as manager:
        optimizer = OPTIMIZERS["adamw"](params)
        tiered = manager.register_optimizer(optimizer, bucket_bytes=1024, residency="disk")
        train(tiered, params, range(4))
        manager.synchronize()
        assert min(counts(tmp_path)) > 0
        files[0].fail("pwrite", how, times=float("inf"))
        train(tiered, params, range(4, 8))
        assert tier.stats().failures > 0
        assert tier.stats().state == "failing"
    assert all(map(torch.equal, params, plain))


def test_a_manager_takes_several_directories(tmp_path: Path, device: str, training: Training) -> None:
    paths = folders(tmp_path)
    with TieringManager(policy=LRUPolicy("8MiB"), device=device, host_bytes=4 * MIB, spill_dir=paths) as manager:
        for _ in range(3):
            assert training.step(manager)
        assert manager.stats()["disk.read.total"] > 0
        assert torch.tensor(counts(tmp_path)).min() > 0
    assert [list(path.iterdir()) for path in paths] == [[], []]


def test_directories_that_cannot_be(tmp_path: Path) -> None:
    one, other = folders(tmp_path)
    for named in ([one, one], [str(one), f"{one}/"], [one, other, one.parent / "drive-1" / ".." / "drive-0"]):
        with pytest.raises(ValueError, match="are one directory"):
            tier_in(named)
    with pytest.raises(SpillDirRefused, match="missing does not exist"):
        tier_in([one, tmp_path / "missing"])
    with pytest.raises(ValueError, match="empty list"):
        tier_in([])
    assert [list(path.iterdir()) for path in (one, other)] == [[], []]
    assert io_threads() == []


def test_two_directories_on_one_file_system_are_counted_once_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = os.statvfs(tmp_path)
    with closing(tier_in(folders(tmp_path))) as tier:
        assert tier.stats().capacity <= 0.51 * found.f_bavail * found.f_frsize
    assert "lie on one drive" in caplog.text


def test_programs_without_ranks_begin_with_different_drives_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(chosen, "offered_drive", lambda number: None)
    count = next(number for number in range(2, 30) if os.getpid() % number)
    with closing(tier_in(folders(tmp_path, count), capacity=MIB)) as tier:
        written(tier, noise(BLOCK))
        assert [number for number, files in enumerate(counts(tmp_path)) if files] == [os.getpid() % count]


@pytest.mark.parametrize("rank", range(3))
def test_ranks_begin_with_different_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    with closing(tier_in(folders(tmp_path), capacity=MIB)) as tier:
        written(tier, noise(BLOCK))
        assert counts(tmp_path) == [1 - rank % 2, rank % 2]


def test_one_write_budget_is_for_all(tmp_path: Path) -> None:
    with closing(tier_in(folders(tmp_path), capacity=MIB, write_budget=10 * BLOCK)) as tier:
        count = 0
        while tier.accepts(BLOCK):
            written(tier, noise(BLOCK, count))
            count += 1
        assert 2 <= count <= 5
        assert tier.stats().written <= 10 * BLOCK
        assert tier.stats().state == "budget spent"


def test_a_read_that_fails_is_the_jobs_error(tmp_path: Path) -> None:
    files = [FaultyFiles(), FaultyFiles()]
    with closing(drives_in(tmp_path, files)) as tier:
        records = [written(tier, noise(BLOCK, seed)) for seed in range(2)]
        files[0].fail("pread", times=float("inf"))
        memory = empty(BLOCK)
        errors = [ended(tier.read(record, [(0, memory.ptr)])) for record in records]
        assert [isinstance(error, OSError) for error in errors].count(True) == 1
