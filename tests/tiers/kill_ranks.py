"""Kills processes that take and give all the time, and looks whether the others know at once what there is.

python -m tests.tiers.kill_ranks --times 200 --seed 0

After each kill all others stop for a moment and say what they have: the sum that the file gives is the same. And
all have written down what they had, and when, so that it can be seen that it was never more than the limit.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import tests.spill.without_torch  # noqa: F401
from tiered_mem.tiers.node_file import NodeFile
from tiered_mem.tiers.node_share import HOST, NodeShare, sign

JOB = "0" * 16
LIMIT = 1000
RANKS = 4
LINE = 32  # bytes of a line of the log: process, "+" or "-", bytes


def joined(folder: Path, rank: int | str = "", job: str = JOB, ranks: int = RANKS, limit: int = LIMIT) -> NodeShare:
    file = NodeFile(folder, job)
    sign(file, str(rank))
    return NodeShare(file, HOST, limit, ranks, most=limit)


class Rank:
    """A process that takes and gives, as it is seen by the one that kills."""

    def __init__(self, folder: Path, log: int, number: int, seed: int) -> None:
        self.number = number
        theirs, self._told = os.pipe()
        self._said, ours = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            try:
                os.close(self._told)
                live(joined(folder, number), log, theirs, ours, random.Random(seed))
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        os.close(theirs)
        os.close(ours)
        self._line()  # it is there

    def stop(self) -> None:
        os.write(self._told, b"s")

    def has(self) -> int:
        """What it has, after `stop`."""
        return int(self._line())

    def go(self) -> None:
        os.write(self._told, b"g")

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1]) == -signal.SIGKILL
        os.close(self._told)
        os.close(self._said)

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self._said, 100) or sys.exit("a rank has ended by itself")
        return line


def live(share: NodeShare, log: int, told: int, say: int, chance: random.Random) -> None:
    """Takes and gives until it is killed. Writes down what it has while it surely has it."""
    os.write(say, b"here\n")
    has: list[int] = []
    while True:
        if select.select([told], [], [], 0)[0]:
            if not os.read(told, 1):
                os._exit(0)
            os.write(say, f"{sum(has)}\n".encode())
            os.read(told, 1)
        nbytes = chance.randrange(1, LIMIT // 2)
        if chance.random() < 0.6 and share.take(nbytes):
            has.append(nbytes)
            note(log, os.getpid(), nbytes)
        elif has:
            nbytes = has.pop(chance.randrange(len(has)))
            note(log, os.getpid(), -nbytes)
            share.give(nbytes)
        if chance.random() < 0.2:
            share.begin_step()


def note(log: int, process: int, nbytes: int) -> None:
    """Lines of all processes are in the order in which they were written. nbytes: 0 is said before a kill."""
    os.write(log, f"{process} {nbytes}".ljust(LINE - 1).encode() + b"\n")


def most(log: Path) -> int:
    """The most bytes that all had at a time."""
    has: dict[int, int] = {}
    killed: set[int] = set()
    found = 0
    for line in log.read_text().splitlines():
        process, nbytes = map(int, line.split())
        if nbytes == 0:
            killed.add(process)
            has.pop(process, None)
        elif process not in killed:
            has[process] = has.get(process, 0) + nbytes
            found = max(found, sum(has.values()))
    return found


def kill(folder: Path, times: int, seed: int) -> int:
    """Raises AssertionError. Returns the most bytes that all but the survivor had at a time."""
    chance = random.Random(seed)
    path = folder / "log"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    survivor = joined(folder / "node", 0)
    ranks = [Rank(folder / "node", log, number, chance.randrange(1 << 30)) for number in range(1, RANKS)]
    for _ in range(times):
        time.sleep(chance.random() / 300)
        victim = ranks.pop(chance.randrange(len(ranks)))
        note(log, victim.process, 0)
        victim.kill()
        for rank in ranks:
            rank.stop()
        had = sum([rank.has() for rank in ranks])
        survivor.look()
        assert survivor.used() == had, f"{survivor.used()}, and the others have {had}"
        assert survivor.ranks() == RANKS - 1
        for rank in ranks:
            rank.go()
        ranks.append(Rank(folder / "node", log, victim.number, chance.randrange(1 << 30)))
    for rank in ranks:
        note(log, rank.process, 0)
        rank.kill()
    survivor.look()
    assert survivor.used() == 0
    os.close(log)
    return most(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = kill(Path(folder), options.times, options.seed)
    there = LIMIT - LIMIT // (4 * RANKS)  # but for the floor of the survivor
    assert found <= there, f"{found} of {there}"
    print(f"{options.times} killed; the most at a time was {found} of {there}")


if __name__ == "__main__":
    main()
