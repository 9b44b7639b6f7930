"""Kills processes that use a spill folder, and looks whether the next one to start leaves nothing of theirs.

python -m tests.spill.kill_owners --times 200
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import tests.spill.without_torch  # noqa: F401
from tiered_mem.spill.folder import SpillFolder, owners, sweep

# What changes folders and files, and what looks at them, as Python names these calls to its audit hooks.
CALLS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "fcntl.flock"}
CONTENT = b"the neighbour's"


def forked(work: Callable[[], None]) -> int:
    """A process that does the work and ends without any cleaning up, as one that is killed does."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def ended(pid: int) -> int:
    """The process's exit status, or the number of the signal that killed it, negative."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def write(folder: SpillFolder, name: str, content: bytes = b"x" * 100) -> None:
    fd = folder.create(name)
    os.write(fd, content)
    os.close(fd)


def live(spill_dir: Path, tell: Callable[[str], None] = lambda _: None) -> None:
    """All that a process does with its folder."""
    tell("making")
    folder = SpillFolder(spill_dir, run="victim")
    for number in range(4):
        tell("working")
        write(folder, f"{number}")
        if number % 2:
            folder.remove(f"{number}")
    tell("closing")
    folder.close()
    tell("closed")


@contextmanager
def neighbour(spill_dir: Path) -> Iterator[Callable[[], None]]:
    """A live process's folder. What it gives must find the folder as it was, and nobody else's."""
    with closing(SpillFolder(spill_dir, run="neighbour")) as folder:
        write(folder, "0", CONTENT)

        def check() -> None:
            found = owners(spill_dir)
            assert [(each.path, each.alive, each.files) for each in found] == [(folder.path, True, 1)], found
            assert sorted(os.listdir(folder.path.parent)) == [folder.path.name]
            assert (folder.path / "0").read_bytes() == CONTENT

        yield check
    assert os.listdir(spill_dir) == []


def start(spill_dir: Path) -> None:
    SpillFolder(spill_dir, run="next").close()


def die(spill_dir: Path) -> None:
    """Leaves a dead process's folder."""

    def work() -> None:
        folder = SpillFolder(spill_dir, run="dead")
        for number in range(3):
            write(folder, f"{number}")

    assert ended(forked(work)) == 0


def killed_at_random(spill_dir: Path, times: int, seed: int) -> Counter[str]:
    """How often a process was killed at which point of its life."""
    chance = random.Random(seed)
    points: Counter[str] = Counter()
    with neighbour(spill_dir) as check:
        for _ in range(times):
            ours, theirs = os.pipe()

            def work(theirs: int = theirs) -> None:
                def tell(point: str) -> None:
                    os.write(theirs, f"{point}\n".encode())

                while True:
                    live(spill_dir, tell)

            pid = forked(work)
            os.close(theirs)
            with open(ours) as told:
                lines = [told.readline() for _ in range(chance.randrange(1, 30))]
                time.sleep(chance.random() / 1000)  # into the midst of what comes next
                os.kill(pid, signal.SIGKILL)
                assert ended(pid) == -signal.SIGKILL
                points[[*lines, *told][-1].strip()] += 1
            start(spill_dir)
            check()
    return points


def killed_before_each_call(spill_dir: Path, work: Callable[[Path], object], leave: Callable[[Path], None]) -> int:
    """How many calls the work makes; a process was killed before each of them, one process for each.

    leave: puts there what each is to find.
    """
    with neighbour(spill_dir) as check:
        for call in itertools.count(1):
            leave(spill_dir)

            def work_until(call: int = call) -> None:
                calls = iter(range(1, call))

                def before(event: str, _: object) -> None:
                    if event in CALLS and next(calls, None) is None:
                        os.kill(os.getpid(), signal.SIGKILL)

                sys.addaudithook(before)
                work(spill_dir)

            status = ended(forked(work_until))
            assert status in (0, -signal.SIGKILL)
            start(spill_dir)
            check()
            if status == 0:
                return call - 1
    raise RuntimeError("there is no end to the calls")


def at_once(spill_dir: Path, processes: int, rounds: int) -> None:
    """Processes start, sweep, look and end at the same time, each fourth time without closing their folder."""

    def work() -> None:
        for number in range(rounds):
            if number % 4 == 0:
                die(spill_dir)
            with closing(SpillFolder(spill_dir, run="one")) as folder:
                write(folder, "0", CONTENT)
                assert folder.path in [each.path for each in owners(spill_dir) if each.alive]
                sweep(spill_dir)
                assert sorted(os.listdir(folder.path)) == ["0", "owner"]
                assert (folder.path / "0").read_bytes() == CONTENT

    for pid in [forked(work) for _ in range(processes)]:
        assert ended(pid) == 0
    sweep(spill_dir)
    assert os.listdir(spill_dir) == []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=int, default=20, help="how many processes to kill at random moments")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        spill_dir = Path(name)
        points = killed_at_random(spill_dir, arguments.times, arguments.seed)
        done = {
            "killed at random": dict(points),
            "killed before each call of a life": killed_before_each_call(spill_dir, live, lambda _: None),
            "killed before each call of a sweep": killed_before_each_call(spill_dir, sweep, die),
        }
        at_once(spill_dir, processes=4, rounds=arguments.times)
    json.dump(done, sys.stdout)


if __name__ == "__main__":
    main()
