"""What ranks of a machine tell each other of their budgets: all hear the same, and nobody waits in vain."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.tiers.kill_ranks import JOB, joined
from tests.tiers.test_node_share import close, in_a_process
from tiered_mem.tiers.node_file import NodeFile
from tiered_mem.tiers.node_share import sign
from tiered_mem.tiers.node_verdicts import NodeVerdicts

pytestmark = pytest.mark.once(why="it needs no device")

LONG_S = 100.0  # longer than a test may take


def rank(folder: Path, number: int | str, *, begun: bool = True) -> NodeVerdicts:
    file = NodeFile(folder, JOB)
    sign(file, str(number))
    verdicts = NodeVerdicts(file)
    if begun:
        verdicts.begin()
    return verdicts


def heard(verdicts: NodeVerdicts) -> list[tuple[int, int, int]]:
    assert verdicts.wait(LONG_S) == []
    return [(each.number, each.needs, each.has) for each in verdicts.too_small()]


def test_all_hear_of_each_budget_that_is_too_small_whoever_goes_first(tmp_path: Path) -> None:
    """Each leaves as soon as it has heard, as one does that ends with an error."""
    rng = random.Random(0)
    for _ in range(30):
        ranks = [rank(tmp_path, number) for number in range(4)]
        together = threading.Barrier(len(ranks))

        def live(number: int, moment: float, ranks: list[NodeVerdicts] = ranks, all: threading.Barrier = together):
            all.wait()
            threading.Event().wait(moment)
            ranks[number].say(*((20 + number, 10) if number % 2 else ()))
            found = heard(ranks[number])
            ranks[number]._file.close()
            return found

        with ThreadPoolExecutor(len(ranks)) as threads:
            found = list(threads.map(live, range(4), [rng.uniform(0, 5e-3) for _ in ranks]))
        assert found == [[(1, 21, 10), (3, 23, 10)]] * 4


def test_budgets_that_are_enough_are_nothing_to_hear_of(tmp_path: Path) -> None:
    ranks = [rank(tmp_path, number) for number in range(3)]
    for each in ranks:
        each.say()
    assert [heard(each) for each in ranks] == [[]] * 3


def test_who_has_not_begun_is_not_waited_for(tmp_path: Path) -> None:
    """Nor who has no budget, and shares host memory only."""
    one, _, share = rank(tmp_path, 0), rank(tmp_path, 1, begun=False), joined(tmp_path, 2)
    one.say(20, 10)
    assert heard(one) == [(0, 20, 10)]
    late = rank(tmp_path, 3)
    late.say()
    assert heard(late) == [], "that was not for it"
    assert share.ranks() == 1


def test_who_gives_up_is_not_waited_for(tmp_path: Path) -> None:
    one, other, third = (rank(tmp_path, number) for number in range(3))
    one.say()
    other._file.close()
    del third  # nobody has closed it
    assert heard(one) == []


def test_who_is_killed_is_not_waited_for(tmp_path: Path) -> None:
    """Not even while its child lives on."""
    found = in_a_process(f"""
        from tiered_mem.tiers.node_verdicts import NodeVerdicts
        def verdicts():
            file = NodeFile(Path({str(tmp_path)!r}), JOB)
            sign(file, "")
            found = NodeVerdicts(file)
            found.begin()
            return found
        one = verdicts()
        ours, theirs = os.pipe()
        other = os.fork()
        if other == 0:
            its = verdicts()
            if os.fork() == 0:
                its.say(20, 10)
                print(its.wait(1e9), its.too_small(), flush=True)
                os.write(theirs, str(os.getpid()).encode())
            signal.pause()
        child = int(os.read(ours, 100))
        one.say()
        print(len(one.wait(0.0)))
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        print(one.wait(1e9), one.too_small())
        os.kill(child, signal.SIGKILL)
        """)
    assert found.splitlines() == ["[] []", "1", "[] []"]


def test_who_says_nothing_is_named(tmp_path: Path) -> None:
    one, other, nameless = rank(tmp_path, 0), rank(tmp_path, 7), rank(tmp_path, "")
    one.say()
    process = os.getpid()
    assert one.wait(0.01) == [f"rank 7 (process {process})", f"process {process}"]
    other.say(3, 2)
    assert one.wait(0.01) == [f"process {process}"]
    nameless.say()
    assert heard(one) == [(7, 3, 2)]


def test_a_word_ends_with_its_record(tmp_path: Path) -> None:
    """The next manager of a rank may have a budget that is enough."""
    one, other = rank(tmp_path, 0), rank(tmp_path, 1)
    one.say()
    other.say(20, 10)
    other._file.close()
    assert heard(one) == [(1, 20, 10)]
    again = rank(tmp_path, 1)
    assert heard(one) == []
    again.say()
    assert heard(again) == []


def test_a_word_is_no_share(tmp_path: Path) -> None:
    share = joined(tmp_path, 0)
    free = share.free()
    one = rank(tmp_path, 1)
    one.say(1 << 60, 1 << 50)
    assert (share.free(), share.used(), share.limit, share.ranks()) == (free, 0, 1000, 1)
    assert share.take(free)
    close(share)
    one._file.close()
    one.say(3, 2)
    one.begin()
    assert (one.wait(LONG_S), one.too_small()) == ([], [])
