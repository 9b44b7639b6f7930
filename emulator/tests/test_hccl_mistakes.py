"""Jobs whose ranks do something wrong over HCCL, or end early: what they are told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emulator.tests.hccl_jobs import HBM, job, said, said_to_torchrun
from emulator.tests.launch import EMULATOR, run, run_ranks, write_script

pytestmark = pytest.mark.once(why="its processes have a schedule of their own")


@job
def test_what_does_not_wait_is_a_race_with_the_programs_lines(tmp_path: Path) -> None:
    for line in said(tmp_path, 2, ("--races",), "emulator.tests.hccl_mistakes", "races"):
        assert line["found"] == {
            "read_without_wait": {"True": [], "False": [["HcclAllReduce", "aclnnMuls", True]]},
            "buffer_used_again": {"True": [], "False": [["HcclAllGather (reads)", "aclnnInplaceZero", True]]},
            "side_stream": {
                "True": [],
                "False": [
                    ["aclnnInplaceMuls", "HcclAllReduce (reads)", True],
                    ["aclnnInplaceMuls", "HcclAllReduce", True],
                ],
            },
        }


@job
def test_ranks_in_another_order_get_an_error_that_says_so(tmp_path: Path) -> None:
    for line in said_to_torchrun(tmp_path, 2, (), "-m", "emulator.tests.hccl_mistakes", "disorder"):
        assert "all ranks must call the same, in the same order" in line["found"]


@job
def test_the_watchdog_ends_a_process_whose_peer_is_gone_with_its_name(tmp_path: Path) -> None:
    done = run_ranks(2, HBM, "-m", "emulator.tests.hccl_mistakes", "death", cwd=tmp_path)
    assert re.search(r"HcclAllReduce of 8 fp32, sum, operation 2.*: rank 1 \(process \d+\) is gone", done.stderr)


@job
def test_a_collective_in_a_graph_is_refused_and_the_next_one_runs(tmp_path: Path) -> None:
    for line in said_to_torchrun(tmp_path, 2, (), "-m", "emulator.tests.hccl_mistakes", "capture"):
        error, at_the_end, result = line["found"]
        assert "HcclAllReduce: a collective in a graph is not emulated" in error
        assert "was not joined" in at_the_end  # the collectives' stream had joined the capture
        assert result == [2] * 8


@job
def test_more_ranks_than_devices(tmp_path: Path) -> None:
    (line, _) = said_to_torchrun(tmp_path, 2, (), "-m", "emulator.tests.hccl_mistakes", "one_device")
    assert "ranks 0 and 1 are both on device 0; each needs one of its own" in line["found"]


@job
def test_torch_multiprocessing_spawns_ranks(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os
        import torch
        import torch.distributed as dist
        import torch.multiprocessing

        def main(rank, store):
            torch.npu.set_device(rank)
            dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=2)
            x = torch.full((3,), rank + 1.0, device="npu")
            dist.all_reduce(x)
            assert x.tolist() == [3, 3, 3]
            dist.destroy_process_group()
            dist.init_process_group("hccl", init_method=f"file://{store}2", rank=rank, world_size=2)
            dist.all_reduce(x)
            if rank == 0:
                print(x.tolist())
            dist.destroy_process_group()

        if __name__ == "__main__":
            torch.multiprocessing.spawn(main, (os.path.abspath("store"),), nprocs=2)
        """,
    )
    done = run(*EMULATOR, "--devices", "2", *HBM, script, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[6.0, 6.0, 6.0]\n"), done.stderr
