"""torch.distributed over HCCL: unmodified programs, in jobs of several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.hccl_jobs import HBM, job, said, said_to_torchrun
from emulator.tests.launch import run_ranks

pytestmark = pytest.mark.once(why="its processes have a schedule of their own")


@pytest.mark.slow(why="its processes import torch, and meet for each collective")
def test_every_collective_of_torch_gives_what_gloo_gives(tmp_path: Path) -> None:
    for line in said_to_torchrun(tmp_path, 2, ("--races",), "-m", "emulator.tests.collectives"):
        assert (line["wrong"], line["checks"], line["races"]) == ({}, 19, [])


@job
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, ("--schedule", "late")),
        (2, ("--schedule", "random", "--seed", "3")),
        (2, ("--clock", "910b3")),
        (4, ("--races",)),
        (8, ()),
    ],
    ids=str,
)
def test_collectives_in_other_schedules_with_a_clock_and_on_more_ranks(
    ranks: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    for line in said(tmp_path, ranks, options, "emulator.tests.collectives"):
        assert (line["wrong"], line["races"]) == ({}, [])


def check_training(lines: list[Any], same: str, *ways: str) -> None:
    """Each way trains on the NPU as another one does there."""
    for line in lines:
        assert line["races"] == []
        for way in ways:
            for model in ("llama", "perceptrons"):
                losses, norm, weights = line[f"{way} {model}"]["npu"]
                others, other_norm, other_weights = line[f"{same} {model}"]["npu"]
                assert (losses, weights) == (others, other_weights)
                assert norm == pytest.approx(other_norm, rel=1e-6)  # shards' squares are added in another order


@job
@pytest.mark.parametrize(
    "options", [("--races",), ("--schedule", "late"), ("--schedule", "random", "--races")], ids=str
)
def test_ddp_and_fsdp2_train_as_over_gloo(options: tuple[str, ...], tmp_path: Path) -> None:
    ways = ("without_hccl", "ddp", "fsdp2", "fsdp2_with_cpu_offload")
    lines = said(tmp_path, 2, options, "emulator.tests.hccl_training", *ways)
    check_training(lines, *ways)
    for line in lines:  # whose kernels have the CPU's bits
        assert all(line[f"{way} perceptrons"]["npu"] == line[f"{way} perceptrons"]["cpu"] for way in ways)
    assert lines[0]["ddp llama"]["npu"][2] == lines[1]["ddp llama"]["npu"][2]


@job
def test_the_order_of_sums_is_that_of_the_ranks(tmp_path: Path) -> None:
    ways = ("without_hccl", "ddp", "without_hccl_in_pairs", "hsdp")
    lines = said(tmp_path, 4, ("--races",), "emulator.tests.hccl_training", *ways)
    check_training(lines, "without_hccl", "ddp")
    check_training(lines, "without_hccl_in_pairs", "hsdp")
    for line in lines:  # or the test could not tell
        assert line["ddp llama"]["npu"][2] != line["hsdp llama"]["npu"][2]


@job
def test_a_training_takes_the_same_modelled_time_each_time(tmp_path: Path) -> None:
    arguments = ("emulator.tests.hccl_training", "ddp", "fsdp2")
    first, second = (said(tmp_path, 2, ("--clock", "910b3"), *arguments) for _ in range(2))
    assert first == second
    assert all(line["now"] > 0 for line in first)


@job
def test_mixed_precision_reduces_in_float32(tmp_path: Path) -> None:
    for line in said(tmp_path, 2, ("--races",), "emulator.tests.hccl_training", "fsdp2_bf16"):
        for found in (line["fsdp2_bf16 llama"], line["fsdp2_bf16 perceptrons"]):
            assert found["npu"][0] == pytest.approx(found["cpu"][0], rel=1e-3)


@job
def test_device_meshes_dtensors_and_checkpoints(tmp_path: Path) -> None:
    for line in said(tmp_path, 2, ("--races",), "emulator.tests.hccl_state", str(tmp_path / "checkpoint")):
        assert (line["wrong"], line["races"]) == ([], [])


@job
def test_a_dry_training_has_the_real_ones_allocations_and_timeline(tmp_path: Path) -> None:
    # Else torch_npu's watchdog frees what collectives have used, by the wall clock.
    unwatched = {"TORCH_HCCL_ASYNC_ERROR_HANDLING": "0"}
    found = []
    for options in ((), ("--dry",)):
        folder = tmp_path / f"{options}"
        folder.mkdir()
        arguments = ("-m", "emulator.tests.hccl_dry", str(folder))
        done = run_ranks(2, ("--clock", "910b3", *HBM, *options), *arguments, cwd=tmp_path, **unwatched)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append([json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)])
    for real, dry in zip(*found, strict=True):
        for way in ("ddp", "fsdp2"):
            assert dry[way]["allocations"] == real[way]["allocations"]
            assert dry[way]["timeline"] == real[way]["timeline"]
            assert (dry[way]["peak"], dry[way]["now"]) == (real[way]["peak"], real[way]["now"])
            names = {name for name, *_ in real[way]["timeline"]}
            assert {"ddp": "HcclAllReduce", "fsdp2": "HcclReduceScatter"}[way] in names


@job
def test_what_reads_its_ranks_answers_is_refused_in_a_dry_run(tmp_path: Path) -> None:
    done = run_ranks(
        2, ("--clock", "910b3", *HBM, "--dry"), "-m", "emulator.tests.hccl_training", "ddp", cwd=tmp_path
    )
    assert done.returncode != 0
    assert "pass init_sync=False, find_unused_parameters=True, with which it reads nothing" in done.stderr
