"""Whatever the drive, or anybody else, does: no wrong byte comes out, and writing goes on afterwards."""

from __future__ import annotations

import errno
import logging
from math import inf
from pathlib import Path

import pytest

from tests.spill.disks import BLOCK, MIB, Disk, disk_in
from tests.spill.faulty_files import NOTHING, ODD, SHORT, FaultyFiles
from tests.spill.memory import noise
from tiered_mem.errors import TierFull
from tiered_mem.spill.disk_tier import DiskRecord

OPERATIONS = ("create", "open", "pread", "pwrite", "allocate", "truncate", "stat", "close", "remove")
OF_THE_CACHE = ("sync", "advise_dropped")
FAULTS = {
    "EIO": errno.EIO,
    "ENOSPC": errno.ENOSPC,
    "EROFS": errno.EROFS,
    "EACCES": errno.EACCES,
    "ENOENT": errno.ENOENT,
}
COUNTS = {"short": SHORT, "nothing": NOTHING}
HARMLESS = ("advise_dropped",)


def cases() -> list[object]:
    """(operation, how it fails, whether direct I/O works)"""
    found = []
    for name, how in FAULTS.items():
        for direct, operations in ((True, OPERATIONS), (False, OPERATIONS if name == "EIO" else OF_THE_CACHE)):
            for operation in operations:
                if (operation, name) != ("remove", "ENOENT"):  # that is as good as a success
                    found.append((operation, name, how, direct))
    found += [("sync", "EIO", errno.EIO, False), ("advise_dropped", "EIO", errno.EIO, False)]
    found += [(operation, *count, True) for operation in ("pread", "pwrite") for count in COUNTS.items()]
    return [
        pytest.param(operation, how, direct, id=f"{operation}-{name}-{'direct' if direct else 'cached'}")
        for operation, name, how, direct in found
    ]


class Run:
    """Writes, reads and gives up records, whatever goes wrong, and checks each outcome."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._records: dict[DiskRecord, bytes] = {}
        self._seed = 0
        self.failures = 0

    def everything(self) -> None:
        """Makes files, uses them again as they are, longer and shorter, and drops some for room."""
        first, second, third = self.put(3), self.put(5), self.put(5)
        self.read_all()
        self.give_up(second)
        self.put(5)
        self.give_up(third)
        self.put(6)
        self.give_up(first)
        self.put(2)
        for record in list(self._records)[1:]:
            self.give_up(record)
        self.put(11)
        self.read_all()

    def put(self, blocks: int) -> DiskRecord | None:
        """Writes a record of so many blocks; if it fails, once more after the pause."""
        self._seed += 1
        content = noise(blocks * BLOCK - 100, self._seed)
        for attempt in range(2):
            try:
                record, memory = self._disk.write(content)
            except TierFull:
                # A file that could not be removed is in the way, until the next write has tried again.
                assert self._disk.files.failed
                return None
            record.job.wait()
            del memory
            if record.job.error is None:
                assert self._disk.tier.stats().state == "ok"
                self._records[record] = content
                return record
            assert isinstance(record.job.error, OSError | TierFull), record.job.error
            self.failures += 1
            self._disk.tier.release(record)
            assert self._disk.tier.stats().state == "failing"
            assert not self._disk.tier.accepts(1)
            self._disk.clock.now += 1 + attempt
        raise AssertionError("one fault has failed two writes")

    def give_up(self, record: DiskRecord | None) -> None:
        if record is not None:
            del self._records[record]
            self._disk.tier.release(record)

    def read_all(self) -> None:
        """Each record is read, at the second time at the latest."""
        for record, content in self._records.items():
            try:
                assert self._disk.get(record) == [content]
            except OSError:
                self.failures += 1
                assert self._disk.get(record) == [content], "it is not lost"


@pytest.mark.parametrize(("operation", "how", "takes_direct"), cases())
def test_any_call_may_fail_at_any_time(tmp_path: Path, operation: str, how: int, takes_direct: bool) -> None:
    for skip in range(100):
        files = FaultyFiles(takes_direct=takes_direct)
        with disk_in(tmp_path, capacity=20 * BLOCK, files=files) as disk:
            files.fail(operation, how, skip=skip)
            run = Run(disk)
            run.everything()
            stats = disk.tier.stats()
            assert stats.failures == run.failures
            assert disk.real_bytes() <= stats.reserved <= disk.capacity
            assert stats.used <= stats.reserved
            if operation in HARMLESS:
                assert run.failures == 0
            if not files.failed:
                # Its calls are through; in this pass nothing failed.
                assert skip > 0 or operation in OF_THE_CACHE
                assert run.failures == 0
                assert disk.real_bytes() == stats.reserved
                return
    raise AssertionError(f"{operation} is called more than 100 times")


@pytest.mark.parametrize("operation", ["pread", "pwrite"])
def test_direct_io_goes_on_at_whole_blocks(tmp_path: Path, operation: str) -> None:
    """A drive may have done a part of one, but not every drive can go on there."""
    with disk_in(tmp_path) as disk:
        if not disk.tier.stats().direct:
            pytest.skip("this file system takes no direct I/O")
        disk.files.calls.clear()
        disk.files.fail(operation, ODD, skip=int(operation == "pread"), times=6)  # not of the header
        record = disk.put(noise(100 * BLOCK))
        assert disk.get(record) == [noise(100 * BLOCK)]
        calls = disk.files.named(operation)
        assert len(calls) > 6
        assert all(call.offset % BLOCK == call.nbytes % BLOCK == 0 for call in calls)


def test_without_direct_io_any_short_count_is_gone_on_from(tmp_path: Path) -> None:
    with disk_in(tmp_path, files=FaultyFiles(takes_direct=False)) as disk:
        for operation in ("pread", "pwrite"):
            disk.files.fail(operation, ODD, times=6)
        record = disk.put(noise(100 * BLOCK))
        assert disk.get(record) == [noise(100 * BLOCK)]


def test_closing_a_file_that_was_read_may_fail(tmp_path: Path) -> None:
    with disk_in(tmp_path) as disk:
        record = disk.put(noise(BLOCK))
        disk.files.fail("close")
        assert disk.get(record) == [noise(BLOCK)]
        assert disk.files.failed == ["close"]
        assert disk.tier.stats().failures == 0


@pytest.mark.parametrize("operation", ["pwrite", "allocate", "create", "sync"])
def test_a_drive_that_stays_broken_is_asked_less_and_less(
    tmp_path: Path, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    with disk_in(tmp_path, files=FaultyFiles(takes_direct=operation != "sync")) as disk:
        good = disk.put(noise(MIB))
        caplog.clear()
        disk.files.fail(operation, times=inf)
        for pause in (1, 2, 4, 8, 16, 32, 60, 60):
            error = disk.refused(noise(MIB))
            assert "Input/output error" in str(error)
            assert disk.tier.stats().state == "failing"
            disk.clock.now += pause - 0.25
            assert not disk.tier.accepts(1)
            with pytest.raises(
                TierFull, match=r"writing is tried again in 0\.2 s, as it failed: .*Input/output error"
            ):
                disk.write(b"x")
            disk.clock.now += 0.25
            assert disk.tier.accepts(MIB)
        assert len(caplog.records) == 1
        assert "stays in memory" in caplog.records[0].getMessage()
        assert disk.get(good) == [noise(MIB)], "what is written can be read"
        stats = disk.tier.stats()
        assert (stats.failures, stats.records, stats.used) == (8, 1, good.nbytes)
        assert disk.real_bytes() == stats.reserved == good.nbytes

        disk.files.heal()
        second = disk.put(noise(MIB, 2))
        assert disk.tier.stats().state == "ok"
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
        assert "works again" in caplog.records[1].getMessage()
        assert disk.get(second) == [noise(MIB, 2)]

        disk.files.fail(operation)
        disk.refused(noise(MIB))
        disk.clock.now += 1
        assert disk.tier.accepts(MIB), "the pauses begin anew"


def test_writes_that_fail_together_count_once(tmp_path: Path) -> None:
    with disk_in(tmp_path) as disk:
        with disk.files.hold("pwrite") as hold:
            writes = [disk.write(noise(MIB, seed)) for seed in range(4)]
            assert hold.reached.wait(60)
            disk.files.fail("pwrite", times=4)
        for record, _ in writes:
            record.job.wait()
            assert record.job.error is not None
        disk.clock.now += 1
        assert disk.tier.accepts(MIB)
        assert disk.tier.stats().failures == 4


def test_a_write_from_before_a_failure_does_not_heal_it(tmp_path: Path) -> None:
    with disk_in(tmp_path, workers=2) as disk:
        with disk.files.hold("pwrite") as hold:
            old, _memory = disk.write(noise(MIB))
            assert hold.reached.wait(60)
            disk.files.fail("create")
            disk.refused(noise(MIB))
        old.job.wait()
        assert old.job.error is None
        assert disk.get(old) == [noise(MIB)]
        assert disk.tier.stats().state == "failing"
        disk.clock.now += 1
        disk.put(noise(MIB))
        assert disk.tier.stats().state == "ok"


def test_files_that_cannot_be_removed_count_until_they_are(tmp_path: Path) -> None:
    with disk_in(tmp_path, capacity=10 * BLOCK) as disk:
        first, second = disk.put(noise(3 * BLOCK)), disk.put(noise(3 * BLOCK))
        disk.files.fail("remove", errno.EACCES, times=inf)
        disk.tier.release(first)
        disk.tier.release(second)
        assert disk.tier.accepts(9 * BLOCK)
        error = disk.refused(noise(9 * BLOCK))
        assert isinstance(error, TierFull)
        assert "cannot be removed" in str(error)
        assert disk.real_bytes() <= disk.tier.stats().reserved <= 10 * BLOCK
        disk.files.heal()
        disk.clock.now += 1
        record = disk.put(noise(9 * BLOCK))
        assert disk.get(record) == [noise(9 * BLOCK)]
        assert disk.real_bytes() == disk.tier.stats().reserved == 10 * BLOCK
        assert disk.tier.stats().files == 1


def test_an_unexpected_exception_ends_in_the_job(tmp_path: Path) -> None:
    with disk_in(tmp_path) as disk:
        good = disk.put(noise(BLOCK))

        def broken(*_: object) -> int:
            raise RuntimeError("this is no OSError")

        disk.files.pwrite = disk.files.pread = broken  # type: ignore[method-assign]
        assert str(disk.refused(noise(BLOCK))) == "this is no OSError"
        assert str(disk.damaged(good)) == "this is no OSError"
        del disk.files.pwrite, disk.files.pread
        disk.clock.now += 1
        disk.put(noise(BLOCK))
        assert disk.get(good) == [noise(BLOCK)]
        assert disk.real_bytes() == disk.tier.stats().reserved == 4 * BLOCK
