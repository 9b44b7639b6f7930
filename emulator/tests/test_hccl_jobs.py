"""torch.distributed over HCCL: unmodified programs, in jobs that torchrun starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.hccl_jobs import job, said


def test_every_collective_of_torch_gives_what_gloo_gives(tmp_path: Path) -> None:
    for line in said(tmp_path, 2, ("--races",), "-m", "emulator.tests.collectives"):
        assert (line["wrong"], line["checks"], line["races"]) == ({}, 19, [])


@job
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, ("--schedule", "late")),
        (2, ("--schedule", "random", "--seed", "3")),
        (2, ("--clock", "910b3")),
        (4, ("--races",)),
    ],
    ids=str,
)
def test_collectives_in_other_schedules_with_a_clock_and_on_four_ranks(
    ranks: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    for line in said(tmp_path, ranks, options, "-m", "emulator.tests.collectives"):
        assert (line["wrong"], line["races"]) == ({}, [])


def check_training(lines: list[Any], *ways: str) -> None:
    for line in lines:
        assert line["races"] == []
        for way in ways:
            ours, theirs = line[f"{way} perceptrons"]["npu"], line[f"{way} perceptrons"]["cpu"]
            assert ours == theirs
            # The products of attention's derivative, and its sums, are others on the NPU: without ranks, too.
            (losses, norm, _), (their_losses, their_norm, _) = (
                line[f"{way} llama"]["npu"],
                line[f"{way} llama"]["cpu"],
            )
            assert losses == pytest.approx(their_losses, rel=1e-6)
            assert norm == pytest.approx(their_norm, rel=1e-5)


@job
@pytest.mark.parametrize(
    "options", [("--races",), ("--schedule", "late"), ("--schedule", "random", "--races")], ids=str
)
def test_ddp_and_fsdp2_train_as_over_gloo(options: tuple[str, ...], tmp_path: Path) -> None:
    ways = ("ddp", "fsdp2", "fsdp2_with_cpu_offload")
    lines = said(tmp_path, 2, options, "-m", "emulator.tests.hccl_training", *ways)
    check_training(lines, *ways)
    for line in lines:  # and all ways are one
        assert len({json.dumps(line[f"{way} llama"]["npu"][0::2]) for way in ways}) == 1
    assert lines[0]["ddp llama"]["npu"][2] == lines[1]["ddp llama"]["npu"][2]


@job
def test_hsdp_trains_as_over_gloo_on_four_ranks(tmp_path: Path) -> None:
    check_training(said(tmp_path, 4, ("--races",), "-m", "emulator.tests.hccl_training", "hsdp"), "hsdp")


@job
def test_a_training_takes_the_same_modelled_time_each_time(tmp_path: Path) -> None:
    arguments = ("-m", "emulator.tests.hccl_training", "ddp", "fsdp2")
    first, second = (said(tmp_path, 2, ("--clock", "910b3"), *arguments) for _ in range(2))
    assert first == second
    assert all(line["now"] > 0 for line in first)


@job
def test_mixed_precision_reduces_in_float32(tmp_path: Path) -> None:
    for line in said(tmp_path, 2, ("--races",), "-m", "emulator.tests.hccl_training", "fsdp2_bf16"):
        for found in (line["fsdp2_bf16 llama"], line["fsdp2_bf16 perceptrons"]):
            assert found["npu"][0] == pytest.approx(found["cpu"][0], rel=1e-3)


@job
def test_device_meshes_dtensors_and_checkpoints(tmp_path: Path) -> None:
    for line in said(tmp_path, 2, ("--races",), "-m", "emulator.tests.hccl_state", str(tmp_path / "checkpoint")):
        assert (line["wrong"], line["races"]) == ([], [])
