"""The suite that every tier below host memory is put through."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import pytest

from tests.spill.memory import Memory, empty, noise
from tiered_mem.errors import Closed, TierFull
from tiered_mem.spill.lower_tier import Job, LowerTier, Record

BLOCK = 4096


class Subject(Protocol):
    """A tier, with room for 64 records of a block and no more than 1 MiB, and ways to disturb it."""

    tier: LowerTier

    def fail(self, kind: str) -> None:
        """The next "write" or "read" fails."""

    def held(self, kind: str) -> AbstractContextManager[Any]:
        """Inside, a "write" or "read" that begins does not end. Those that are asked for are let go."""


def written(tier: LowerTier, *contents: bytes) -> Record:
    """A record that is in the tier; the memory that it came from is gone."""
    memory = [Memory(content) for content in contents]
    record = tier.write([part.piece(f"part.{n}") for n, part in enumerate(memory)], step=3, kind="activation")
    assert record.job.wait()
    assert (record.job.done, record.job.error) == (True, None)
    return record


def contents(tier: LowerTier, record: Record, *wanted: tuple[int, int]) -> list[bytes]:
    """Of each of these pieces, index and size."""
    memory = [empty(nbytes) for _, nbytes in wanted]
    job = tier.read(record, [(index, part.ptr) for (index, _), part in zip(wanted, memory, strict=True)])
    return [part.content for part in memory] if ended(job) is None else []


def ended(job: Job) -> Exception | None:
    assert job.wait()
    assert job.done
    return job.error


def what_was_written_comes_back(subject: Subject) -> None:
    parts = [noise(size, size) for size in (5000, 1, BLOCK, 3 * BLOCK + 7)]
    record = written(subject.tier, *parts)
    for _ in range(2):
        assert contents(subject.tier, record, *((n, len(part)) for n, part in enumerate(parts))) == parts


def pieces_come_back_alone_and_in_any_order(subject: Subject) -> None:
    parts = [noise(5000, 0), noise(BLOCK, 1), noise(100, 2)]
    record = written(subject.tier, *parts)
    assert contents(subject.tier, record, (1, BLOCK)) == [parts[1]]
    assert contents(subject.tier, record, (2, 100), (0, 5000), (2, 100)) == [parts[2], parts[0], parts[2]]


def records_do_not_mix(subject: Subject) -> None:
    """Not even where one takes the room of another."""
    memory = [Memory(noise(BLOCK, seed)) for seed in range(6)]
    records = [subject.tier.write([part.piece()], step=0, kind="optimizer") for part in memory]
    assert [ended(record.job) for record in records] == [None] * 6
    subject.tier.release(records.pop(0))
    records.append(written(subject.tier, noise(BLOCK, 6)))
    assert [contents(subject.tier, record, (0, BLOCK)) for record in records] == [
        [noise(BLOCK, seed)] for seed in range(1, 7)
    ]
    assert subject.tier.stats().records == 6


def there_is_a_limit(subject: Subject) -> None:
    tier, memory, records = subject.tier, Memory(bytes(BLOCK)), []
    assert not tier.accepts(tier.stats().capacity + 1)
    while tier.accepts(BLOCK):
        records.append(tier.write([memory.piece()], step=0, kind="activation"))
        assert len(records) <= 256
    assert len(records) >= 64
    with pytest.raises(TierFull):
        tier.write([memory.piece()], step=0, kind="activation")
    assert all(ended(record.job) is None for record in records)
    assert BLOCK * len(records) <= tier.stats().used <= tier.stats().capacity
    tier.release(records.pop())
    tier.release(records[0])
    tier.release(records[0])
    assert tier.accepts(BLOCK)
    assert tier.stats().records == len(records) - 1


def a_failed_write_ends_in_its_job(subject: Subject) -> None:
    subject.fail("write")
    memory = Memory(noise(BLOCK))
    record = subject.tier.write([memory.piece()], step=0, kind="activation")
    assert isinstance(ended(record.job), Exception)
    subject.tier.release(record)
    stats = subject.tier.stats()
    assert (stats.used, stats.records, stats.failures) == (0, 0, 1)


def a_failed_read_ends_in_its_job(subject: Subject) -> None:
    one, other = written(subject.tier, noise(BLOCK, 1)), written(subject.tier, noise(BLOCK, 2))
    subject.fail("read")
    assert isinstance(ended(subject.tier.read(one, [(0, empty(BLOCK).ptr)])), Exception)
    assert contents(subject.tier, other, (0, BLOCK)) == [noise(BLOCK, 2)]
    assert subject.tier.stats().failures == 1


def a_write_can_be_given_up(subject: Subject) -> None:
    """What has begun ends, and what has not never begins."""
    tier, memory = subject.tier, [Memory(noise(BLOCK, seed)) for seed in range(3)]
    with subject.held("write"):
        records = [tier.write([part.piece()], step=0, kind="activation") for part in memory]
        tier.release(records[2])
        assert records[2].job.done
        assert isinstance(records[2].job.error, Exception)
        tier.release(records[0])
    assert ended(records[1].job) is None
    assert records[0].job.wait()
    assert contents(tier, records[1], (0, BLOCK)) == [noise(BLOCK, 1)]
    assert tier.stats().records == 1


def a_record_that_is_read_can_be_released(subject: Subject) -> None:
    tier, memory = subject.tier, empty(BLOCK)
    record = written(tier, noise(BLOCK, 1))
    with subject.held("read"):
        job = tier.read(record, [(0, memory.ptr)])
        tier.release(record)
        assert tier.stats().records == 0
    written(tier, noise(BLOCK, 2))
    assert ended(job) is None
    assert memory.content == noise(BLOCK, 1)


def watchers_hear_of_each_operation(subject: Subject) -> None:
    heard: list[tuple[str, int, float, float]] = []
    subject.tier.watch(lambda *what: heard.append(what))
    began = subject.tier.now()
    contents(subject.tier, written(subject.tier, noise(BLOCK)), (0, BLOCK))
    assert [kind for kind, *_ in heard] == ["write", "read"]
    assert all(nbytes >= BLOCK for _, nbytes, *_ in heard)
    times = [began, *(time for *_, begin, end in heard for time in (begin, end)), subject.tier.now()]
    assert times == sorted(times)
    stats = subject.tier.stats()
    assert (stats.written, stats.read) == (heard[0][1], heard[1][1])


def nothing_goes_on_after_the_end(subject: Subject) -> None:
    tier, memory = subject.tier, Memory(noise(BLOCK))
    record = written(tier, noise(BLOCK, 1))
    job = tier.read(record, [(0, memory.ptr)])
    tier.close()
    tier.close()
    assert job.done
    assert memory.content == noise(BLOCK, 1)
    assert not tier.accepts(1)
    with pytest.raises(Closed):
        tier.write([memory.piece()], step=0, kind="activation")
    with pytest.raises(Closed):
        tier.read(record, [(0, memory.ptr)])
    tier.release(record)
    tier.stats()


CONTRACT: list[Callable[[Subject], None]] = [
    what_was_written_comes_back,
    pieces_come_back_alone_and_in_any_order,
    records_do_not_mix,
    there_is_a_limit,
    a_failed_write_ends_in_its_job,
    a_failed_read_ends_in_its_job,
    a_write_can_be_given_up,
    a_record_that_is_read_can_be_released,
    watchers_hear_of_each_operation,
    nothing_goes_on_after_the_end,
]
