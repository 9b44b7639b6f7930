"""Jobs in the time of a modelled drive: they run when that has come and somebody asks, and no sooner."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ascend_emulator.drives import DriveJob, DriveQueue

from tests.modelled.slow_drive import SlowDrive, SlowOperation
from tests.spill.disks import MIB, disk_in
from tests.spill.memory import Memory
from tiered_mem.spill.disk_tier import DiskTier
from tiered_mem.spill.io_queue import IoQueue
from tiered_mem.spill.lower_tier import Piece
from tiered_mem.spill.reader import read_header


@dataclass
class Work:
    """Jobs that note down when they run, and what they are told of their times."""

    queue: DriveQueue
    drive: SlowDrive
    order: list[str] = field(default_factory=list)
    told: list[tuple[float, float]] = field(default_factory=list)

    def submit(self, name: str) -> tuple[DriveJob, SlowOperation]:
        read = name.startswith("read")
        job = self.queue.submit(
            lambda: self.order.append(name), urgent=read, nbytes=100, told=lambda *times: self.told.append(times)
        )
        return job, self.drive.operations[-1]


@pytest.fixture
def work() -> Iterator[Work]:
    drive = SlowDrive()
    queue = DriveQueue(drive, IoQueue(2, "test-io"))
    yield Work(queue, drive)
    queue.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-io")]


def test_a_job_runs_when_its_time_has_come_and_somebody_asks(work: Work) -> None:
    job, operation = work.submit("write")
    assert (operation.nbytes, operation.read) == (100, False)
    assert not job.done
    operation.end(3, 5)
    assert work.order == []
    assert job.done
    assert (work.order, work.told, job.error) == (["write"], [(3, 5)], None)
    assert job.done
    assert job.wait()
    assert work.order == ["write"], "once"


def test_a_wait_has_the_drives_limit(work: Work) -> None:
    job, operation = work.submit("read")
    assert operation.read
    assert not job.wait(0.5)
    assert work.order == []
    assert job.wait()
    assert operation.waited == [0.5, None]
    assert work.order == ["read"]


def test_whoever_asks_at_the_same_time_waits_for_the_one_run(work: Work) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        assert go_on.wait(60)
        work.order.append("ran")

    job = work.queue.submit(run, urgent=True, nbytes=1, told=lambda *times: None)
    work.drive.operations[-1].end()
    found: list[bool] = []
    asking = [threading.Thread(target=lambda: found.append(job.done)) for _ in range(3)]
    for thread in asking:
        thread.start()
    assert begun.wait(60)
    assert found == []
    go_on.set()
    for thread in asking:
        thread.join(60)
    assert (found, work.order) == ([True] * 3, ["ran"])


def test_an_error_ends_in_the_job(work: Work) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "broken")

    job = work.queue.submit(fail, urgent=False, nbytes=1, told=lambda *times: work.told.append(times))
    work.drive.operations[-1].end(1, 2)
    assert job.error is None
    assert job.wait()
    assert isinstance(job.error, OSError)
    assert work.told == [(1, 2)]


def test_a_write_can_be_taken_back_until_the_drive_begins_with_it(work: Work) -> None:
    (first, begun), (second, _), (read, _) = work.submit("first"), work.submit("second"), work.submit("read")
    begun.begun = True
    assert not work.queue.cancel(first)
    assert work.queue.cancel(second)
    assert second.done
    assert isinstance(second.error, CancelledError)
    assert not work.queue.cancel(second)
    assert not work.queue.cancel(read), "reads are never cancelled"
    assert first.wait()
    assert not work.queue.cancel(first)
    assert work.order == ["first"]


def test_closing_cancels_what_has_not_begun_and_runs_the_rest(work: Work) -> None:
    (first, begun), (second, _), (read, _) = work.submit("first"), work.submit("second"), work.submit("read")
    begun.begun = True
    work.queue.close()
    assert work.order == ["first", "read"]
    assert first.done
    assert read.done
    assert isinstance(second.error, CancelledError)
    work.queue.close()


def test_a_tier_hands_its_records_to_the_drive(tmp_path: Path) -> None:
    drive = SlowDrive()
    heard: list[tuple[str, int, float, float]] = []
    with disk_in(tmp_path, drive=drive) as disk:
        disk.tier.watch(lambda *what: heard.append(what))
        record, _memory = disk.write(b"a" * 5000, b"b" * 100)
        (write,) = drive.operations
        assert (write.nbytes, write.read) == (4096 + 8192 + 4096, False)
        assert len(disk.files.named("pwrite")) == 1, "only the trial"
        write.end(1, 4)
        assert record.job.done
        job, memory = disk.read(record)
        read = drive.operations[-1]
        assert (read.nbytes, read.read) == (4096 + 8192 + 4096, True)
        read.end(5, 6)
        assert job.done
        assert [part.content for part in memory] == [b"a" * 5000, b"b" * 100]
        assert heard == [("write", write.nbytes, 1, 4), ("read", read.nbytes, 5, 6)]
        unwritten, _memory = disk.write(b"c")
        disk.tier.release(unwritten)
        assert drive.operations[-1].cancelled
        assert disk.tier.stats().written == write.nbytes


def test_a_failed_write_pauses_by_the_drives_clock(tmp_path: Path) -> None:
    drive = SlowDrive()
    with disk_in(tmp_path, drive=drive, clock=None) as disk:
        disk.files.fail("pwrite")
        assert isinstance(disk.refused(b"a"), OSError)
        assert disk.tier.stats().state == "failing"
        drive.seconds = 0.9
        assert not disk.tier.accepts(1)
        drive.seconds = 1.1
        assert disk.tier.accepts(1)


def test_with_a_dry_drive_files_have_headers_and_no_data(tmp_path: Path) -> None:
    drive = SlowDrive(dry=True)
    tier = DiskTier(tmp_path, capacity=1 << 41, drive=drive)
    memory, back = Memory(b"a" * MIB), Memory(b"b" * MIB)
    record = tier.write([memory.piece("a")], step=3, kind="activation")
    assert record.job.wait()
    assert record.job.error is None
    (path,) = tmp_path.rglob("*.safetensors")
    assert (path.stat().st_size, tier.stats().written) == (4096 + MIB, 4096 + MIB)
    assert 512 * path.stat().st_blocks < 64 << 10
    assert [entry.nbytes for entry in read_header(path).entries] == [MIB]
    job = tier.read(record, [(0, back.ptr)])
    assert job.wait()
    assert job.error is None
    assert back.content == b"b" * MIB
    huge = tier.write([Piece("huge", memory.ptr, 1 << 40, "uint8")], step=3, kind="activation")
    assert huge.job.wait()
    assert huge.job.error is None
    assert tier.stats().used == (1 << 40) + MIB + 2 * 4096
    tier.close()
    assert list(tmp_path.iterdir()) == []
