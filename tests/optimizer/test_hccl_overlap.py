"""Steps in backward of several ranks, over the emulator's HCCL: what may be, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator.tests.hccl_jobs import SCHEDULES, job, said

pytestmark = pytest.mark.once(why="its processes have a schedule of their own")

WORKER = "tests.optimizer.hccl_overlap_worker"


@job
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_sharded_training_is_the_one_without_an_overlap(schedule: tuple[str, ...], tmp_path: Path) -> None:
    """FSDP2 calls the hooks of a parameter on the stream on which it has scattered the gradient's sum."""
    ways = ("fsdp2", "announced", "at last", "hsdp")
    for line in said(tmp_path, 2, ("--races", "--schedule", *schedule), WORKER, *ways):
        for way in ways:
            plain, tiered = line[way]["plain"], line[way]["tiered"]
            assert tiered["outcome"] == plain["outcome"], way
            assert tiered["freed"] == 3 * tiered["parameters"], "all but the first step is made in backward"
        assert line["races"] == []


@job
def test_what_changes_gradients_after_backward_is_refused_in_the_first_step(tmp_path: Path) -> None:
    """Also where the sum over all ranks changes no bit of a gradient, which it may in the steps to come."""
    ddp = [
        f"ddp, {view=}, {alike=}, {later=}"
        for view in (False, True)
        for alike, later in ((False, False), (True, False), (True, True))
    ]
    unseen = "clipped, which changes nothing"
    for line in said(tmp_path, 2, (), WORKER, "clipped", unseen, *ddp):
        for way in ("clipped", *ddp):
            assert "gradients were changed between backward and step" in line[way], way
        # And when it does change something, there are no gradients.
        assert "somebody wants a gradient" in line[unseen]
