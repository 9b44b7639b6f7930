from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from tests.spill.disks import BLOCK, MIB, disk_in, io_threads, open_in
from tests.spill.faulty_files import FaultyFiles
from tests.spill.light import output_of
from tests.spill.memory import Memory, noise
from tiered_mem.errors import Closed
from tiered_mem.spill.disk_tier import DiskTier

ONE_MIB_FILE = MIB + BLOCK


# Records that are given up


def test_a_write_that_has_not_begun_is_taken_back(tmp_path: Path) -> None:
    with disk_in(tmp_path, capacity=2 * ONE_MIB_FILE) as disk:
        with disk.files.hold("pwrite") as hold:
            first, _memory = disk.write(noise(MIB))
            assert hold.reached.wait(60)
            second, _memory_too = disk.write(noise(MIB, 1))
            assert disk.tier.stats().records == 2
            disk.tier.release(second)
            assert second.job.done, "at once: its memory is free"
            assert isinstance(second.job.error, CancelledError)
            assert disk.tier.stats().records == 1
            disk.tier.release(second)
            third, memory = disk.write(noise(MIB, 2))
        third.job.wait()
        del memory
        assert disk.get(first) == [noise(MIB)]
        assert disk.get(third) == [noise(MIB, 2)]
        assert disk.tier.stats().failures == 0
        assert disk.tier.stats().files == 2
        with pytest.raises(ValueError, match=f"record {second.number} was released"):
            disk.tier.read(second, [])


def test_a_record_may_be_released_while_it_is_written(tmp_path: Path) -> None:
    with disk_in(tmp_path) as disk:
        with disk.files.hold("pwrite") as hold:
            first, _memory = disk.write(noise(MIB))
            assert hold.reached.wait(60)
            disk.tier.release(first)
            assert not first.job.done, "its memory is still being read"
            assert disk.tier.stats().used == 0
            second, _memory_too = disk.write(noise(MIB, 1))
        second.job.wait()
        assert first.job.error is None
        assert disk.get(second) == [noise(MIB, 1)]
        assert disk.tier.stats().files == 2
        disk.put(noise(MIB))
        assert disk.tier.stats().files == 2, "the first one's is used again"


def test_a_record_may_be_released_while_it_is_read(tmp_path: Path) -> None:
    with disk_in(tmp_path, workers=2) as disk:
        first = disk.put(noise(MIB))
        with disk.files.hold("pread") as hold:
            job, memory = disk.read(first)
            assert hold.reached.wait(60)
            disk.tier.release(first)
            second = disk.put(noise(MIB, 1))
            assert disk.tier.stats().files == 2, "the file is in use"
            with pytest.raises(ValueError, match="was released"):
                disk.read(first)
        job.wait()
        assert job.error is None
        assert memory[0].content == noise(MIB)
        disk.put(noise(MIB, 2))
        assert disk.tier.stats().files == 2
        assert disk.get(second) == [noise(MIB, 1)]


def test_reads_of_one_record_may_overlap(tmp_path: Path) -> None:
    with disk_in(tmp_path, workers=3) as disk:
        record = disk.put(noise(MIB))
        reads = [disk.read(record) for _ in range(8)]
        disk.tier.release(record)
        for job, memory in reads:
            job.wait()
            assert job.error is None
            assert memory[0].content == noise(MIB)
        disk.put(noise(MIB, 1))
        assert disk.tier.stats().files == 1


# Order


def test_reads_come_before_writes(tmp_path: Path) -> None:
    with disk_in(tmp_path) as disk:
        old = [disk.put(noise(size)) for size in (BLOCK, 2 * BLOCK)]
        with disk.files.hold("create") as hold:
            first = disk.write(noise(MIB))
            assert hold.reached.wait(60)
            disk.files.calls.clear()
            writes = [disk.write(noise(size)) for size in (3 * BLOCK, 4 * BLOCK)]
            reads = [disk.read(record) for record in old]
        for record, _ in (first, *writes):
            record.job.wait()
        data = [call for call in disk.files.named("pread", "pwrite") if call.offset == BLOCK]
        assert [(call.operation, call.nbytes) for call in data] == [
            ("pwrite", MIB),
            ("pread", BLOCK),
            ("pread", 2 * BLOCK),
            ("pwrite", 3 * BLOCK),
            ("pwrite", 4 * BLOCK),
        ]
        assert all(job.done and job.error is None for job, _ in reads)


def test_no_call_waits_for_the_drive(tmp_path: Path) -> None:
    """All of this is asked while the only thread is stuck, from the thread that must set it free."""
    with disk_in(tmp_path) as disk:
        old, gone = disk.put(noise(MIB)), disk.put(noise(MIB))
        with disk.files.hold("pwrite") as hold:
            first, _memory = disk.write(noise(MIB))
            assert hold.reached.wait(60)
            read, _memory_too = disk.read(old)
            second, _memory_three = disk.write(noise(MIB))
            disk.tier.release(gone)
            assert disk.tier.accepts(MIB)
            assert disk.tier.stats().records == 3
            assert not any(job.done for job in (first.job, second.job, read))


def test_files_are_open_only_while_they_are_used(tmp_path: Path) -> None:
    with disk_in(tmp_path, workers=2) as disk:
        before = open_in(tmp_path)
        records = [disk.put(noise(BLOCK, seed)) for seed in range(20)]
        assert open_in(tmp_path) == before
        for job, _memory in [disk.read(record) for record in records]:
            job.wait()
        assert open_in(tmp_path) == before
        assert disk.files.most_open <= 2


# The end


def test_closing_ends_what_is_under_way_and_takes_back_the_rest(tmp_path: Path) -> None:
    with disk_in(tmp_path) as disk:
        old = disk.put(noise(MIB))
        with disk.files.hold("pwrite") as hold:
            first, _memory = disk.write(noise(MIB, 1))
            assert hold.reached.wait(60)
            second, _memory_too = disk.write(noise(MIB, 2))
            job, memory = disk.read(old)
            closing = threading.Thread(target=disk.tier.close)
            closing.start()
            second.job.wait()
            assert isinstance(second.job.error, CancelledError)
            assert not disk.tier.accepts(1)
            with pytest.raises(Closed):
                disk.write(b"x")
            with pytest.raises(Closed):
                disk.tier.read(old, [])
        closing.join(60)
        assert first.job.done
        assert first.job.error is None
        assert job.error is None
        assert memory[0].content == noise(MIB)
        for record in (old, first, second):
            disk.tier.release(record)
        disk.tier.close()


def test_a_tier_that_is_forgotten_leaves_nothing(tmp_path: Path, no_gc: None) -> None:
    tier = DiskTier(tmp_path, capacity=MIB, workers=2)
    memory = Memory(noise(5000))
    record = tier.write([memory.piece()], step=0, kind="activation")
    record.job.wait()
    job = tier.read(record, [(0, memory.ptr)])
    job.wait()
    wrong = tier.write([memory.piece()], step=0, kind="activation")
    tier.release(wrong)
    del tier, record, job, wrong
    until_gone(lambda: io_threads() == [])
    assert list(tmp_path.iterdir()) == []


def test_a_tier_with_failures_holds_nothing_in_a_cycle(tmp_path: Path, no_gc: None) -> None:
    files = FaultyFiles()
    tier = DiskTier(tmp_path, capacity=MIB, files=files)
    memory = Memory(noise(5000))
    record = tier.write([memory.piece()], step=0, kind="activation")
    record.job.wait()
    files.fail("pread")
    job = tier.read(record, [(0, memory.ptr)])
    job.wait()
    files.fail("pwrite", errno.ENOSPC)
    wrong = tier.write([memory.piece()], step=0, kind="activation")
    wrong.job.wait()
    assert job.error is not None
    assert wrong.job.error is not None
    del tier, record, job, wrong
    until_gone(lambda: io_threads() == [])
    assert list(tmp_path.iterdir()) == []


def until_gone(gone: Callable[[], bool]) -> None:
    """What a thread does last, it does a little after its last job is done."""
    deadline = time.monotonic() + 60
    while not gone() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert gone()


def test_a_forked_child_has_no_part_in_it(tmp_path: Path) -> None:
    """It ends as a program does, even where a thread of the parent's held every lock as it was forked."""
    output_of(f"""
        import threading
        from pathlib import Path
        from tests.spill.disks import disk_in

        with disk_in(Path({str(tmp_path)!r})) as disk:
            record = disk.put(b"parent")
            held, go_on = threading.Event(), threading.Event()

            def hold_the_locks():
                with disk.tier._lock, disk.tier._queue._changed:
                    held.set()
                    go_on.wait()

            thread = threading.Thread(target=hold_the_locks)
            thread.start()
            held.wait()
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                assert not disk.tier.accepts(1)
                for forbidden in (lambda: disk.write(b"child"), lambda: disk.tier.read(record, [])):
                    try:
                        forbidden()
                        os._exit(1)
                    except Closed:
                        pass
                disk.tier.release(record)
                disk.tier.close()
                sys.exit()
            go_on.set()
            thread.join()
            assert os.waitpid(child, 0)[1] == 0
            assert disk.get(record) == [b"parent"]
        """)
    assert list(tmp_path.iterdir()) == []
