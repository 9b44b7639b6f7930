"""`tiered-mem inspect` of saved optimizer states."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from emulator.tests.launch import run
from tests.cli.conftest import Command
from tests.cli.test_without_torch import COMMAND
from tests.optimizer.training import give_gradients, make_params
from tests.spill.without_torch import ROOT
from tiered_mem import TieringManager
from tiered_mem.optimizer.saved_index import INDEX


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """States of three of four parameters, in two groups."""
    folder = tmp_path_factory.mktemp("saved")
    params = make_params("cpu", shapes=[(8, 8), (4,), (3, 3), (2,)])
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": torch.tensor(0.5), "weight_decay": 0.0}]
    with TieringManager(policy="lru", device="cpu", host_bytes="1MiB") as manager:
        optimizer = manager.register_optimizer(torch.optim.AdamW(groups, foreach=False), bucket_bytes=3000)
        give_gradients(params, 0, missing=False)
        params[1].grad = None
        optimizer.step()
        optimizer.save(folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    for path in saved.rglob("*"):
        if path.is_file():
            to = tmp_path / "copy" / path.relative_to(saved)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(path.read_bytes())
    return tmp_path / "copy"


def first(folder: Path) -> Path:
    return min(folder.rglob("*.safetensors"))


@pytest.mark.parametrize("verify", [False, True])
def test_groups_and_files_are_shown(verify: bool, saved: Path, command: Command) -> None:
    done = command("inspect", saved, *["--verify"] * verify)
    assert (done.status, done.err) == (0, "")
    assert f"{saved}: AdamW with 4 parameters, of which 3 have a state; 10 tensors" in done.out
    assert "betas=(0.9, 0.999)" in done.out
    assert "lr=group.1.lr" in done.out
    assert first(saved).name in done.out
    assert ("right" if verify else "whole") in done.out


def test_programs_are_told_the_same(saved: Path, command: Command) -> None:
    told = json.loads(command("inspect", saved, "--verify", "--json").out)
    files = told.pop("files")
    groups = told.pop("groups")
    nbytes = 3 * 4 + 2 * 4 * (64 + 9 + 2) + 4
    about = {"schema": 1, "saved_states": str(saved), "optimizer": "AdamW", "parameters": 4, "states": 3}
    assert told == about | {"tensors": 10, "bytes": nbytes}
    assert [group["params"] for group in groups] == [[0, 1, 2], [3]]
    assert len(files) > 1
    assert {each["state"] for each in files} == {"right"}
    assert sum(each["bytes"] for each in files) == nbytes
    assert sum(each["entries"] for each in files) == 10


def test_damaged_data_is_found_where_it_is_looked_for(copy: Path, command: Command) -> None:
    path = first(copy)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert command("inspect", copy).status == 0
    done = command("inspect", copy, "--verify")
    assert done.status == 1
    assert done.out.count("wrong") == 1
    assert f"{path.relative_to(copy)}: xxh3_64 of" in done.out
    told = json.loads(command("inspect", copy, "--verify", "--json").out)
    assert [each["state"] for each in told["files"]].count("wrong") == 1
    assert "expected" in next(each["problem"] for each in told["files"] if each["state"] == "wrong")


def test_a_missing_file_is_found_anyway(copy: Path, command: Command) -> None:
    first(copy).unlink()
    done = command("inspect", copy)
    assert done.status == 1
    assert "the file: expected" in done.out


def test_a_damaged_index_is_one_line(copy: Path, command: Command) -> None:
    (copy / INDEX).write_text("{}")
    done = command("inspect", copy)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"tiered-mem: {copy / INDEX}: its first line: expected")
    assert done.err.count("\n") == 1


def test_it_needs_no_torch(saved: Path) -> None:
    done = run("-c", COMMAND, "inspect", str(saved), "--verify", cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "right" in done.stdout
