"""Kills ranks of trainings at random moments, until each training is through; what it comes to is always the same.

    python -m tests.distributed.restarts --kills 50 --seed 0

torch.distributed.run begins a job again when one of its ranks is killed, and `resumed` goes on from the last
checkpoint. When a job is through another one is begun, until there were as many kills as wanted. Each has the bits
of one that is not tiered and that nobody killed, and leaves no spill files.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import Progress

from emulator.tests.hccl_jobs import HBM, lines_of
from emulator.tests.launch import OF_RANKS, ROOT, command_of_ranks, plain_environment

RANKS = 2
WORKER = "tests.distributed.resumed"
# As long as it takes to begin, and to make some steps.
LIFE_S = 9.0
# The store that torchrun's agent shares has what the ranks of the last attempt had written in it.
OF_AN_ATTEMPT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console, rng = Console(highlight=False), random.Random(options.seed)
    killed = jobs = restarts = 0
    with tempfile.TemporaryDirectory() as name, Progress(console=console) as progress:
        folder = Path(name)
        expected = ended(begun(folder / "plain", options.steps, "--plain"))
        bar = progress.add_task("kills", total=options.kills)
        while killed < options.kills:
            jobs += 1
            this = folder / str(jobs)
            job = begun(this, options.steps)
            for _ in kills(job, rng, options.kills - killed):
                killed += 1
                progress.update(bar, completed=killed)
            found = ended(job)
            restarts += found[0]["lives"] - 1
            if [line["digest"] for line in found] != [line["digest"] for line in expected]:
                sys.exit(f"job {jobs}: other bits than those of a plain one")
            if left := os.listdir(this / "spill"):
                sys.exit(f"job {jobs}: {left} are left")
    console.print(
        f"{killed} kills, {jobs} jobs of {options.steps} steps, {restarts} restarts: the plain bits, no file left"
    )


def begun(folder: Path, steps: int, *more: str) -> subprocess.Popen[str]:
    folder.mkdir()
    launcher = ("--max-restarts", "1000", "--monitor-interval", "0.1", "-m", WORKER)
    command = command_of_ranks(RANKS, HBM, *launcher, str(folder), "--steps", str(steps), *more)
    environment = plain_environment(PYTHONPATH=str(ROOT), **OF_RANKS, **OF_AN_ATTEMPT)
    with (folder / "errors").open("w") as errors:
        return subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )


def kills(job: subprocess.Popen[str], rng: random.Random, most: int) -> Iterator[None]:
    """Kills a rank at random moments, as long as the job runs."""
    agent = psutil.Process(job.pid)
    for _ in range(most):
        try:
            job.wait(rng.uniform(0, LIFE_S))
            return
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(psutil.NoSuchProcess):
            if ranks := [each for each in agent.children(recursive=True) if WORKER in each.cmdline()]:
                rng.choice(ranks).kill()
                yield


def ended(job: subprocess.Popen[str]) -> list[Any]:
    """What each rank said in the end. One that was killed just after that has said it in vain."""
    said, _ = job.communicate()
    lines = lines_of(said)
    found = [line for line in lines if line["lives"] == max(each["lives"] for each in lines)]
    if job.returncode or len(found) != RANKS:
        sys.exit(f"a job ended with {job.returncode}: {said[-1000:]}")
    return found


if __name__ == "__main__":
    main()
