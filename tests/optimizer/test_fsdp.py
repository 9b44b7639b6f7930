"""Fully sharded models, whose states are DTensors: on the CPU, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from emulator.tests.launch import plain_environment
from tests.conftest import RACES

WORKER = Path(__file__).with_name("fsdp_worker.py")
ROOT = WORKER.parents[2]
SECONDS = 250  # only what hangs takes as long

pytestmark = [
    pytest.mark.skipif(RACES, reason="its processes are on the CPU, and run without the detector already"),
    pytest.mark.slow(why="its processes import torch, and meet for each step"),
]


class Launch:
    """Processes that did jobs together, one after the other."""

    def __init__(self, world: int, folder: Path, *jobs: str) -> None:
        self.folder = folder
        self._world = world
        name = "+".join(jobs)
        outputs = [folder / f"{name} {rank}.txt" for rank in range(world)]
        processes = [self._start(name, rank, output) for rank, output in enumerate(outputs)]
        deadline = time.monotonic() + SECONDS
        try:
            codes: list[int | str] = [process.wait(max(0, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            codes = ["waits" if (code := process.poll()) is None else code for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said = "\n".join(f"rank {rank}:\n{output.read_text()[-3000:]}" for rank, output in enumerate(outputs))
        self._end = f"ended with {codes}\n{said}"

    def check(self, job: str) -> None:
        """Fails, with what the processes have said, unless all of them got through with the job."""
        through = [(self.folder / f"{job} {rank} of {self._world}").exists() for rank in range(self._world)]
        assert all(through), self._end

    def _start(self, jobs: str, rank: int, output: Path) -> subprocess.Popen[bytes]:
        meeting = self.folder / f"meeting for {jobs}"
        command = [WORKER, jobs, rank, self._world, meeting, self.folder]
        environment = plain_environment(
            PYTHONPATH=str(ROOT), TMPDIR=str(self.folder), TORCH_DEVICE_BACKEND_AUTOLOAD="0", OMP_NUM_THREADS="1"
        )
        with output.open("wb") as stream:
            return subprocess.Popen(
                [sys.executable, *map(str, command)], cwd=ROOT, env=environment, stdout=stream, stderr=stream
            )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Two processes, which have left a checkpoint and what became of it three steps later."""
    return Launch(2, tmp_path_factory.mktemp("fsdp"), "refusals", "places", "train")


def test_all_processes_refuse_an_optimizer_that_needs_all_at_once(trained: Launch) -> None:
    """Though the second one has nothing of the parameters that show it."""
    trained.check("refusals")


def test_states_are_dtensors_over_the_pool_and_the_window(trained: Launch) -> None:
    """So are those of a state_dict, over memory of their own."""
    trained.check("places")


def test_each_step_is_that_of_an_unwrapped_optimizer(trained: Launch) -> None:
    """With shards that are uneven or empty, and optimizers for which the processes have to meet."""
    trained.check("train")


def test_new_processes_go_on_from_a_checkpoint(trained: Launch) -> None:
    """With the same shards, or with those of another dimension, and in any residency."""
    Launch(2, trained.folder, "resume").check("resume")


def test_a_single_process_goes_on_from_a_checkpoint_of_two(trained: Launch) -> None:
    Launch(1, trained.folder, "resume_alone").check("resume_alone")
