"""What managers of one machine share: who gets what, and what becomes of it when one of them dies."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from textwrap import dedent

import hypothesis
import pytest
from hypothesis import strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from emulator.tests.launch import run
from tests.tiers.kill_ranks import JOB, LIMIT, RANKS, joined
from tiered_mem.errors import TierFull
from tiered_mem.tiers.node_file import NodeFile
from tiered_mem.tiers.node_share import HOST, SPILL, WRITES, EqualShare, NodeShare, sign

pytestmark = pytest.mark.once(why="it needs no device")

ROOT = Path(__file__).parents[2]
FLOOR = LIMIT // (4 * RANKS)
OTHER_JOB = "1" * 16


def share_of(folder: Path, kind: object = HOST, *, most: int = LIMIT, now: bool = False) -> NodeShare:
    file = NodeFile(folder, JOB)
    sign(file, "")
    return NodeShare(file, kind, LIMIT, 1, most=most, now=now)  # type: ignore[arg-type]


def close(share: NodeShare) -> None:
    share._file.close()


def test_who_needs_more_takes_it_but_for_the_floors_of_the_others(tmp_path: Path) -> None:
    """Of those too that have not come yet."""
    first = joined(tmp_path, 0)
    assert first.free() == LIMIT - 3 * FLOOR
    assert not first.take(LIMIT - 3 * FLOOR + 1)
    assert first.take(LIMIT - 3 * FLOOR)
    others = [joined(tmp_path, rank) for rank in range(1, RANKS)]
    for other in others:
        assert other.floor == other.free() == FLOOR
        assert other.take(FLOOR)
        assert not other.take(1)
    assert first.used() == LIMIT
    first.give(10)
    assert others[0].take(10)
    assert not others[1].take(1)


def test_what_one_manager_gives_up_is_there_for_the_others(tmp_path: Path) -> None:
    one, other = share_of(tmp_path), share_of(tmp_path)
    assert one.take(500)
    assert not other.take(600)
    close(one)
    assert other.take(LIMIT)
    assert one.take(1) is False
    assert (one.free(), one.taken, one.used(), one.limit, one.ranks()) == (0, 0, 0, 0, 0)
    one.give(500)
    assert other.used() == LIMIT


def test_a_floor_is_at_most_what_is_wanted(tmp_path: Path) -> None:
    small, other = share_of(tmp_path, most=10), share_of(tmp_path)
    assert small.floor == 10
    assert other.free() == LIMIT - 10


def test_what_is_taken_at_once_is_there_or_refused_with_who_has_it(tmp_path: Path) -> None:
    first = joined(tmp_path, 3)
    assert first.take(500)
    second = share_of(tmp_path, most=300, now=True)
    assert second.floor == 300
    assert not first.take(201 - 2 * FLOOR)  # two ranks are to come
    with pytest.raises(
        TierFull, match=rf"needed 200 B, .* share 1000 B \(rank 3 \(process {os.getpid()}\) has 500 B"
    ):
        share_of(tmp_path, most=200, now=True)
    assert first.ranks() == 2


def test_the_smallest_limit_counts_and_who_says_another_one_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = joined(tmp_path, 0, limit=1000), joined(tmp_path, 1, limit=800)
    assert one.limit == other.limit == 800
    assert not caplog.records
    joined(tmp_path, 2, limit=900)
    assert "node_bytes is 900 B in this process, and 800 B in another of this machine" in caplog.text
    close(other)
    assert one.limit == 900


def test_who_is_refused_is_heard_by_the_others_at_their_next_step(tmp_path: Path) -> None:
    one, other = share_of(tmp_path), share_of(tmp_path)
    assert one.take(700)
    assert one.begin_step() == 0
    assert not other.take(600)
    assert (one.begin_step(), other.begin_step(), one.begin_step()) == (600, 0, 0)
    one.give(300)
    assert other.take(600)
    assert one.begin_step() == 0


def test_a_refusal_is_looked_into_once_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = share_of(tmp_path), share_of(tmp_path)
    assert one.take(700)
    assert not other.take(600)
    with monkeypatch.context() as patch:
        patch.delattr("fcntl.fcntl")  # no system call
        assert not other.take(500)
        one.give(1)
        assert other.begin_step() == 0
    one.give(699)
    assert other.take(500)


def test_all_may_count_on_what_they_are_told_at_a_time(tmp_path: Path) -> None:
    shares = [joined(tmp_path, rank) for rank in range(RANKS)]
    assert [share.counted_on() for share in shares] == [(LIMIT - 3 * FLOOR) // RANKS] * RANKS
    assert shares[0].take(400)
    told = [share.counted_on() for share in shares]
    assert told[0] > 400
    assert sum(told) <= LIMIT
    assert shares[1].take(shares[1].free())
    assert shares[2].counted_on() == FLOOR


def test_each_kind_of_bytes_is_by_itself(tmp_path: Path) -> None:
    file = NodeFile(tmp_path, JOB)
    host, spill = (NodeShare(file, kind, LIMIT, 1, most=LIMIT) for kind in (HOST, SPILL))
    assert host.take(LIMIT)
    assert spill.take(LIMIT)
    other = share_of(tmp_path, SPILL)
    assert other.free() == 0
    assert "raise node_spill_bytes" in other.advice()


def test_what_was_written_stays_written_while_anybody_lives(tmp_path: Path) -> None:
    one, other = share_of(tmp_path, WRITES), share_of(tmp_path, WRITES)
    assert one.take(600)
    one.give(100)  # was not written
    close(one)
    third = share_of(tmp_path, WRITES)  # has the record of the first
    assert (third.taken, third.used(), third.free()) == (0, 500, 500)
    assert third.take(300)
    assert (third.taken, other.used()) == (300, 800)
    assert not other.take(201)
    assert "1000 B that the ranks of this machine may write, 800 B are spent" in other.advice()
    close(other)
    close(third)
    assert share_of(tmp_path, WRITES).used() == 0


def test_two_jobs_do_not_mix_and_who_starts_removes_files_of_the_dead(tmp_path: Path) -> None:
    one, other = joined(tmp_path, 0), joined(tmp_path, 0, job=OTHER_JOB)
    assert one.take(100)
    assert (one.used(), other.used()) == (100, 0)
    assert sorted(os.listdir(tmp_path)) == [JOB, OTHER_JOB]
    close(one)
    (tmp_path / "somebody's").touch()
    close(joined(tmp_path, 0, job="2" * 16))
    assert sorted(os.listdir(tmp_path)) == [OTHER_JOB, "2" * 16, "somebody's"]
    assert joined(tmp_path, 1, job=OTHER_JOB).ranks() == 2


def test_a_file_is_not_removed_while_somebody_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when that one has seen that it is still there, and has no record yet."""
    close(joined(tmp_path))
    same = os.path.samestat

    def another_starts(*files: os.stat_result) -> bool:
        monkeypatch.undo()
        close(joined(tmp_path, job=OTHER_JOB))
        return same(*files)

    monkeypatch.setattr("os.path.samestat", another_starts)
    share = joined(tmp_path, 0)
    assert sorted(os.listdir(tmp_path)) == [JOB, OTHER_JOB]
    assert joined(tmp_path, 1).ranks() == share.ranks() == 2


def test_who_joins_a_file_that_is_just_removed_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close(joined(tmp_path))
    lock = fcntl.fcntl

    def removed(fd: int, command: int, argument: bytes) -> object:
        if command == fcntl.F_OFD_SETLKW:
            monkeypatch.undo()
            os.unlink(tmp_path / JOB)
        return lock(fd, command, argument)

    monkeypatch.setattr("fcntl.fcntl", removed)
    share = joined(tmp_path, 0)
    assert joined(tmp_path, 1).ranks() == share.ranks() == 2


def test_the_file_is_this_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    close(joined(folder))
    modes = [stat.S_IMODE(os.stat(path).st_mode) for path in (folder, folder / JOB)]
    assert modes == [0o700, 0o600]
    folder.chmod(0o750)
    with pytest.raises(PermissionError, match="is not this user's alone"):
        joined(folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        joined(tmp_path / "link")


def test_there_may_be_as_many_managers_as_there_are_records(tmp_path: Path) -> None:
    shares = [share_of(tmp_path) for _ in range(255)]
    with pytest.raises(OSError, match="255 managers of this job"):
        share_of(tmp_path)
    close(shares[17])
    assert share_of(tmp_path).ranks() == 1


def test_an_equal_share_is_that_and_no_more() -> None:
    share = EqualShare(HOST, 1000, 4)
    assert share.take(250)
    assert not share.take(1)
    share.give(50)
    assert (share.limit, share.floor, share.free(), share.used(), share.counted_on()) == (250, 250, 50, 200, 250)
    with pytest.raises(
        TierFull, match="free 50 B, used 200 B, limit 250 B; each rank of this machine has an equal"
    ):
        raise share.full(100)


def in_a_process(code: str, **environment: str) -> str:
    """What it prints. It has no torch."""
    head = (
        "import os, resource, signal, sys, time\nfrom pathlib import Path\nfrom tests.tiers.kill_ranks import *\n"
    )
    done = run("-c", head + dedent(code), cwd=ROOT, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_does_not_keep_a_dead_ranks_share(tmp_path: Path) -> None:
    """It lives on, as a worker of a data loader may. Nor can it change what its parent has."""
    found = in_a_process(f"""
        survivor = joined(Path({str(tmp_path)!r}), 0)
        ours, theirs = os.pipe()
        owner = os.fork()
        if owner == 0:
            share = joined(Path({str(tmp_path)!r}), 1)
            print(share.take(500), flush=True)
            if os.fork() == 0:
                share.give(200)
                print(share.take(1), share.free(), flush=True)
                os.write(theirs, str(os.getpid()).encode())
            signal.pause()
        child = int(os.read(ours, 100))
        survivor.look()
        print(survivor.used())
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        survivor.look()
        print(survivor.used())
        os.kill(child, signal.SIGKILL)
        """)
    assert found.split() == ["True", "False", "0", "500", "0"]


def test_a_rank_may_be_killed_at_any_call_of_the_system(tmp_path: Path) -> None:
    found = in_a_process(f"""
        survivor = joined(Path({str(tmp_path)!r}), 0)
        assert survivor.take(300)
        for last in range(1, 100):
            child = os.fork()
            if child == 0:
                calls = 0
                def count(name, arguments):
                    global calls
                    calls += name in ("open", "os.mkdir", "os.listdir", "fcntl.fcntl", "mmap.__new__")
                    if calls == last:
                        os.kill(os.getpid(), signal.SIGKILL)
                sys.addaudithook(count)
                share = joined(Path({str(tmp_path)!r}), 1)
                share.take(400)
                share.take(400)
                share.begin_step()
                share.give(100)
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            survivor.look()
            assert (survivor.used(), survivor.ranks()) == (300, 1)
            if status == 0:
                break
        print(last > 15)
        """)
    assert found == "True\n"


def test_killed_ranks_leave_what_they_had_to_the_others(tmp_path: Path) -> None:
    done = run("-m", "tests.tiers.kill_ranks", "--times", "200", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "200 killed" in done.stdout


class Managers(RuleBasedStateMachine):
    """Managers of one process that come, take, give and leave, beside what each of them must have."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self._folder = tempfile.TemporaryDirectory()
        self.managers: list[tuple[NodeShare, int]] = []
        self.taken: list[int] = []

    def free(self, number: int | None = None) -> int:
        """Of a manager, or of one that is to come."""
        held = sum(
            max(taken, share.floor)
            for other, ((share, _), taken) in enumerate(zip(self.managers, self.taken, strict=True))
            if other != number
        )
        ranks = {rank for _, rank in self.managers}
        own = 0 if number is None else self.taken[number]
        return LIMIT - held - own - FLOOR * (RANKS - len(ranks))

    @precondition(lambda self: len(self.managers) < 6)
    @rule(rank=strategies.integers(0, RANKS - 1), most=strategies.integers(1, LIMIT), now=strategies.booleans())
    def come(self, rank: int, most: int, now: bool) -> None:
        file = NodeFile(Path(self._folder.name), JOB)
        sign(file, str(rank))
        there = self.free() + FLOOR * (rank not in {rank for _, rank in self.managers})
        if now and most > there:
            with pytest.raises(TierFull):
                NodeShare(file, HOST, LIMIT, RANKS, most=most, now=True)
            file.close()
            return
        share = NodeShare(file, HOST, LIMIT, RANKS, most=most, now=now)
        assert share.floor == (most if now else max(0, min(most, FLOOR, there)))
        self.managers.append((share, rank))
        self.taken.append(0)

    @precondition(lambda self: self.managers)
    @rule(data=strategies.data(), nbytes=strategies.integers(1, LIMIT))
    def take(self, data: strategies.DataObject, nbytes: int) -> None:
        number = data.draw(strategies.integers(0, len(self.managers) - 1))
        free = self.free(number)
        assert self.managers[number][0].free() == max(0, free)
        assert self.managers[number][0].take(nbytes) == (nbytes <= free)
        if nbytes <= free:
            self.taken[number] += nbytes

    @precondition(lambda self: any(self.taken))
    @rule(data=strategies.data())
    def give(self, data: strategies.DataObject) -> None:
        number = data.draw(strategies.sampled_from([n for n, taken in enumerate(self.taken) if taken]))
        nbytes = data.draw(strategies.integers(1, self.taken[number]))
        self.managers[number][0].give(nbytes)
        self.taken[number] -= nbytes

    @precondition(lambda self: self.managers)
    @rule(data=strategies.data(), closed=strategies.booleans())
    def leave(self, data: strategies.DataObject, closed: bool) -> None:
        number = data.draw(strategies.integers(0, len(self.managers) - 1))
        share, _ = self.managers.pop(number)
        self.taken.pop(number)
        if closed:
            close(share)
        else:
            del share  # as with a process that dies, only the lock is gone

    @invariant()
    def all_know_the_sum(self) -> None:
        assert sum(self.taken) <= LIMIT
        for (share, _), taken in zip(self.managers, self.taken, strict=True):
            share.look()
            assert share.used() == sum(self.taken)
            assert share.taken == taken

    def teardown(self) -> None:
        for share, _ in self.managers:
            close(share)
        self._folder.cleanup()


TestManagers = Managers.TestCase
TestManagers.settings = hypothesis.settings(max_examples=60, stateful_step_count=30, deadline=None)
