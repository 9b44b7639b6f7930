from __future__ import annotations

from pathlib import Path

import pytest

from tests.spill.disks import BLOCK, MIB, disk_in, io_threads, open_in
from tests.spill.memory import noise
from tiered_mem.errors import SpillDirRefused, TierFull
from tiered_mem.spill.disk_tier import SMALLEST_RECORD, DiskTier

ONE_MIB_FILE = MIB + BLOCK


# Room


def test_it_takes_what_it_was_given_and_not_more(tmp_path: Path) -> None:
    with disk_in(tmp_path, capacity=3 * ONE_MIB_FILE) as disk:
        assert disk.tier.accepts(3 * MIB)
        records = [disk.put(noise(MIB, seed)) for seed in range(3)]
        stats = disk.tier.stats()
        assert stats.used == stats.reserved == stats.peak == disk.real_bytes() == 3 * ONE_MIB_FILE
        assert (stats.records, stats.files) == (3, 3)
        assert not disk.tier.accepts(1)
        with pytest.raises(TierFull, match=r"disk tier: needed 8\.0 KiB, free 0 B") as full:
            disk.write(b"x")
        assert (full.value.needed, full.value.free, full.value.used) == (SMALLEST_RECORD, 0, 3 * ONE_MIB_FILE)
        assert full.value.limit == 3 * ONE_MIB_FILE
        assert disk.tier.stats().state == "ok"
        disk.tier.release(records[1])
        assert disk.tier.accepts(MIB)
        assert not disk.tier.accepts(MIB + 1)
        assert disk.get(disk.put(noise(MIB, 9))) == [noise(MIB, 9)]
        assert disk.get(records[2]) == [noise(MIB, 2)]


def test_files_are_used_again(tmp_path: Path) -> None:
    with disk_in(tmp_path) as disk:
        for step in range(3):
            records = [disk.put(noise(size, step)) for size in (MIB, 2 * MIB, 3 * MIB)]
            for record in records:
                disk.tier.release(record)
        assert disk.tier.stats().files == 3
        made = disk.files.named("create", "allocate", "truncate")
        assert [call.operation for call in made[1:]] == 3 * ["create", "allocate"], "after the trial"
        assert disk.tier.stats().reserved == disk.real_bytes() == 6 * MIB + 3 * BLOCK
        assert disk.tier.stats().used == 0


def test_the_file_that_fits_best_is_used_again(tmp_path: Path) -> None:
    with disk_in(tmp_path) as disk:
        records = [disk.put(noise(size)) for size in (MIB, 2 * MIB, 3 * MIB)]
        names = [disk.path(record).name for record in records]
        for record in records:
            disk.tier.release(record)
        smaller = disk.put(noise(2 * MIB - BLOCK))
        assert disk.path(smaller).name == names[1]
        assert disk.path(smaller).stat().st_size == smaller.nbytes == 2 * MIB
        larger = disk.put(noise(4 * MIB))
        assert disk.path(larger).name == names[2]
        assert disk.tier.stats().reserved == disk.real_bytes() == smaller.nbytes + larger.nbytes + ONE_MIB_FILE


def test_files_that_nobody_needs_make_room(tmp_path: Path) -> None:
    with disk_in(tmp_path, capacity=4 * ONE_MIB_FILE) as disk:
        kept, *others = [disk.put(noise(MIB, seed)) for seed in range(4)]
        for record in others:
            disk.tier.release(record)
        assert disk.tier.accepts(3 * MIB)
        large = disk.put(noise(3 * MIB))
        assert disk.get(large) == [noise(3 * MIB)]
        assert disk.get(kept) == [noise(MIB, 0)]
        assert disk.tier.stats().files == 2
        assert disk.tier.stats().reserved == disk.real_bytes()


def test_a_smaller_record_in_a_large_file_gives_the_rest_back(tmp_path: Path) -> None:
    with disk_in(tmp_path, capacity=4 * ONE_MIB_FILE) as disk:
        disk.tier.release(disk.put(noise(4 * MIB)))
        small = disk.put(noise(MIB))
        assert disk.path(small).stat().st_size == ONE_MIB_FILE
        assert disk.tier.stats().reserved == ONE_MIB_FILE
        assert disk.get(disk.put(noise(3 * MIB))) == [noise(3 * MIB)]


@pytest.mark.parametrize("capacity", [SMALLEST_RECORD - 1, 0, -1])
def test_a_capacity_that_holds_nothing_is_refused(tmp_path: Path, capacity: int) -> None:
    with pytest.raises(ValueError, match=f"{capacity} bytes; the smallest record takes {SMALLEST_RECORD}"):
        DiskTier(tmp_path, capacity=capacity)
    assert list(tmp_path.iterdir()) == []


def test_a_capacity_that_the_file_system_has_not_got_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"capacity is 1048576.0 TiB, and the file system of .* has .*iB left"):
        DiskTier(tmp_path, capacity=1 << 60)
    assert list(tmp_path.iterdir()) == []
    assert io_threads() == []


def test_bad_arguments_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        DiskTier(tmp_path, capacity=MIB, workers=0)
    with pytest.raises(ValueError, match="md5"):
        DiskTier(tmp_path, capacity=MIB, checksum="md5")
    with pytest.raises(SpillDirRefused):
        DiskTier(tmp_path / "missing", capacity=MIB)
    assert list(tmp_path.iterdir()) == []
    assert open_in(tmp_path) == []


# Budget


def test_no_more_is_written_than_the_budget_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    budget = 2 * ONE_MIB_FILE + 5 * BLOCK
    with disk_in(tmp_path, write_budget=budget) as disk:
        first = disk.put(noise(MIB))
        disk.tier.release(first)
        second = disk.put(noise(MIB, 1))
        stats = disk.tier.stats()
        assert stats.written == 2 * ONE_MIB_FILE + BLOCK, "with the old header, which was written over"
        assert stats.state == "ok"
        assert not disk.tier.accepts(MIB)
        with pytest.raises(TierFull, match=r"of the write budget of 2\.0 MiB, 2\.0 MiB are spent; raise it"):
            disk.write(noise(MIB))
        assert disk.tier.stats().state == "budget spent"
        assert disk.get(second) == [noise(MIB, 1)]
        assert disk.tier.accepts(2 * BLOCK)
        disk.put(noise(2 * BLOCK))
        assert disk.tier.stats().state == "ok"
        assert not disk.tier.accepts(1)
        assert disk.tier.stats().written <= budget
    told = [record.getMessage() for record in caplog.records if "write budget" in record.getMessage()]
    assert len(told) == 1


def test_a_write_that_did_not_begin_costs_nothing_of_the_budget(tmp_path: Path) -> None:
    with disk_in(tmp_path, write_budget=2 * ONE_MIB_FILE + 2 * BLOCK) as disk:
        with disk.files.hold("pwrite") as hold:
            first, _memory = disk.write(noise(MIB))
            assert hold.reached.wait(60)
            second, _memory_too = disk.write(noise(MIB))
            assert not disk.tier.accepts(MIB)
            disk.tier.release(second)
            assert disk.tier.accepts(MIB)
        first.job.wait()
        assert disk.tier.stats().written == ONE_MIB_FILE
