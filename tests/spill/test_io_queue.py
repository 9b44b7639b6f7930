from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from functools import partial
from types import FrameType
from typing import Any

import pytest

from tiered_mem.spill.io_queue import IoQueue
from tiered_mem.spill.lower_tier import Job

TraceFunction = Callable[[FrameType, str, Any], Any]


class Work:
    """Jobs that note down when they run. The first one waits until `go_on` is set."""

    def __init__(self, queue: IoQueue) -> None:
        self._queue = queue
        self.order: list[str] = []
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.first = queue.submit(self._wait, urgent=False)
        assert self.begun.wait(60)

    def submit(self, name: str, *, urgent: bool) -> Job:
        return self._queue.submit(lambda: self.order.append(name), urgent=urgent)

    def _wait(self) -> None:
        self.begun.set()
        assert self.go_on.wait(60)


@pytest.fixture
def queue() -> Iterator[IoQueue]:
    queue = IoQueue(1, "test-io")
    yield queue
    queue.close()


@pytest.fixture
def work(queue: IoQueue) -> Iterator[Work]:
    work = Work(queue)
    yield work
    work.go_on.set()


def finish(*jobs: Job) -> None:
    for job in jobs:
        job.wait()
        assert job.done
        assert job.error is None


def threads(prefix: str = "test-io") -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]


def test_urgent_jobs_come_first_and_else_those_that_came_first(work: Work) -> None:
    names = ["write 1", "read 1", "write 2", "read 2", "read 3"]
    jobs = [work.submit(name, urgent=name.startswith("read")) for name in names]
    assert not any(job.done for job in jobs)
    work.go_on.set()
    finish(*jobs, work.first)
    assert work.order == ["read 1", "read 2", "read 3", "write 1", "write 2"]


def test_jobs_run_side_by_side_on_all_threads() -> None:
    queue = IoQueue(3, "test-io")
    together = threading.Barrier(3)
    jobs = [queue.submit(lambda: together.wait(60) and None, urgent=False) for _ in range(3)]
    finish(*jobs)
    queue.close()


@pytest.mark.parametrize("exception", [OSError(5, "broken"), MemoryError("none left"), KeyError("what")])
def test_an_exception_ends_in_the_job_and_the_thread_goes_on(queue: IoQueue, exception: Exception) -> None:
    def fail() -> None:
        raise exception

    job = queue.submit(fail, urgent=True)
    job.wait()
    assert job.done
    assert job.error is exception
    finish(queue.submit(lambda: None, urgent=True))


@pytest.mark.parametrize("exception", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_not_even_what_ends_programs_ends_the_thread(queue: IoQueue, exception: BaseException) -> None:
    def fail() -> None:
        raise exception

    job = queue.submit(fail, urgent=True)
    job.wait()
    assert isinstance(job.error, RuntimeError)
    assert type(exception).__name__ in str(job.error)
    finish(queue.submit(lambda: None, urgent=True))


def test_an_error_says_where_it_came_from_and_holds_nothing_alive(queue: IoQueue, no_gc: None) -> None:
    class Big:
        pass

    def fails_deep_down(big: Big) -> None:
        try:
            raise OSError(5, "broken")
        except OSError as error:
            raise ValueError("because of it") from error

    def fail(big: Big) -> None:
        fails_deep_down(big)

    big = Big()
    alive = weakref.ref(big)
    job = queue.submit(partial(fail, big), urgent=False)
    job.wait()
    del big
    assert alive() is None
    error = job.error
    assert error is not None
    names = []
    part = error.__traceback__
    while part is not None:
        names.append(part.tb_frame.f_code.co_name)
        part = part.tb_next
    assert names[-2:] == ["fail", "fails_deep_down"]
    gone = weakref.ref(job)
    del job, error, part
    assert gone() is None


def test_a_finished_job_is_not_kept_by_the_thread(queue: IoQueue, no_gc: None) -> None:
    job = queue.submit(lambda: None, urgent=False)
    finish(job)
    # The thread lets go of it before it takes the next one.
    finish(queue.submit(lambda: None, urgent=False), queue.submit(lambda: None, urgent=False))
    gone = weakref.ref(job)
    del job
    assert gone() is None


def test_a_job_can_be_taken_back_until_it_begins(queue: IoQueue, work: Work) -> None:
    first, second = work.submit("first", urgent=False), work.submit("second", urgent=False)
    assert queue.cancel(first)
    assert first.done
    assert isinstance(first.error, CancelledError)
    assert not queue.cancel(first)
    assert not queue.cancel(work.first), "it has begun"
    work.go_on.set()
    finish(second, work.first)
    assert work.order == ["second"]
    assert not queue.cancel(second)


def test_closing_runs_urgent_jobs_and_cancels_the_others(queue: IoQueue, work: Work) -> None:
    read, write = work.submit("read", urgent=True), work.submit("write", urgent=False)
    closing = threading.Thread(target=queue.close)
    closing.start()
    write.wait()
    assert isinstance(write.error, CancelledError)
    assert not read.done
    assert closing.is_alive(), "what is under way is waited for"
    work.go_on.set()
    closing.join(60)
    finish(read, work.first)
    assert work.order == ["read"]
    assert threads() == []
    queue.close()
    with pytest.raises(RuntimeError, match="closed"):
        queue.submit(lambda: None, urgent=True)


def test_a_job_may_close_its_own_queue() -> None:
    queue = IoQueue(2, "test-io")
    job = queue.submit(queue.close, urgent=True)
    finish(job)
    queue.close()
    assert threads() == []


def test_threads_that_cannot_be_started_leave_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse_the_second(thread: threading.Thread) -> None:
        if thread.name.endswith("-1"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_second)
    with pytest.raises(RuntimeError, match="can't start"):
        IoQueue(2, "test-io")
    assert threads() == []


@pytest.mark.timeout(120)  # threads that wait for such a lock do not end
def test_an_interrupt_of_whoever_submits_leaves_no_lock_taken(queue: IoQueue) -> None:
    """At each call and return on the way, where Python looks for signals."""
    for reached in range(1, 100):
        left = reached

        def interrupt(frame: FrameType, event: str, argument: object) -> TraceFunction:
            nonlocal left
            left -= event in ("call", "return")
            if left == 0:
                raise KeyboardInterrupt
            return interrupt

        sys.settrace(interrupt)
        try:
            queue.submit(lambda: None, urgent=True)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert queue.submit(lambda: None, urgent=True).wait(30), reached
        if left > 0:
            break
    assert 5 < reached < 99


@pytest.mark.parametrize("workers", [0, -1])
def test_there_must_be_a_thread(workers: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        IoQueue(workers, "test-io")
