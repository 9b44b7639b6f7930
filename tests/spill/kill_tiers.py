"""Kills processes in the midst of writing and reading records, and looks whether the next one finds all in order.

python -m tests.spill.kill_tiers --times 200
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import tests.spill.without_torch  # noqa: F401
from tests.spill.kill_owners import ended, forked, neighbour
from tests.spill.memory import Memory, empty, noise
from tiered_mem.spill.disk_tier import DiskTier

MIB = 1 << 20


def round_trip(tier: DiskTier, seed: int, say: Callable[[str], None] = lambda _: None) -> None:
    """Two records go down and come back with the bytes that they had."""
    chance = random.Random(seed)
    before = [Memory(noise(chance.randrange(1, MIB), seed + index)) for index in range(4)]
    say("writing")
    records = [
        tier.write([part.piece(f"block.{index}") for index, part in enumerate(pair)], step=seed, kind="activation")
        for pair in (before[:2], before[2:])
    ]
    for record in records:
        record.job.wait()
        if record.job.error is not None:
            raise record.job.error
    say("reading")
    after = [empty(part.nbytes) for part in before]
    jobs = [
        tier.read(record, [(0, pair[0].ptr), (1, pair[1].ptr)])
        for record, pair in zip(records, (after[:2], after[2:]), strict=True)
    ]
    for job in jobs:
        job.wait()
        if job.error is not None:
            raise job.error
    for one, other in zip(before, after, strict=True):
        if one.content != other.content:
            raise ValueError(f"wrong bytes, with seed {seed}")
    say("releasing")
    for record in records:
        tier.release(record)


def start(spill_dir: Path, seed: int) -> None:
    """The next process: it begins, moves records of its own, and ends."""

    def work() -> None:
        tier = DiskTier(spill_dir, capacity=16 * MIB)
        round_trip(tier, seed)
        tier.close()

    if ended(forked(work)) != 0:
        raise RuntimeError(f"the process after number {seed} failed")


def kill(spill_dir: Path, times: int, seed: int) -> Counter[str]:
    """How often a process was killed at which point of its life."""
    chance = random.Random(seed)
    points: Counter[str] = Counter()
    with neighbour(spill_dir) as check:
        for number in range(times):
            ours, theirs = os.pipe()

            def work(theirs: int = theirs, number: int = number) -> None:
                def say(point: str) -> None:
                    os.write(theirs, f"{point}\n".encode())

                while True:
                    tier = DiskTier(spill_dir, capacity=16 * MIB)
                    for step in range(3):
                        round_trip(tier, 10 * number + step, say)
                    tier.close()

            pid = forked(work)
            os.close(theirs)
            with open(ours) as told:
                lines = [told.readline() for _ in range(chance.randrange(1, 20))]
                time.sleep(chance.random() / 100)  # into the midst of what comes next
                os.kill(pid, signal.SIGKILL)
                if ended(pid) != -signal.SIGKILL:
                    raise RuntimeError("it ended by itself")
                points[[*lines, *told][-1].strip()] += 1
            start(spill_dir, number)
            check()
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=int, default=20, help="how many processes to kill")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        json.dump(kill(Path(name), arguments.times, arguments.seed), sys.stdout)


if __name__ == "__main__":
    main()
