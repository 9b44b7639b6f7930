"""The probe of the link, on the device under test. Of an emulated link's figures only their presence is tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Command
from tests.conftest import EMULATED
from tests.spill.folders import tree

ONLY = ("--bytes", "10KB")


def test_the_link_is_measured(command: Command, tmp_path: Path, device: str) -> None:
    done = command("probe", tmp_path, *ONLY, "--json")
    assert done.status == 0
    assert tree(tmp_path) == set()
    link = json.loads(done.out)["link"]
    assert min(link[name] for name in ("to_device", "from_device", "both")) > 0
    assert link["device"]
    assert link["alignment"] % 4096 == 0
    assert "numa_node" in link
    assert link["pinned"] is True
    if EMULATED:
        assert link["pin"] == "acl"


def test_a_table_names_what_was_measured(command: Command, tmp_path: Path, device: str) -> None:
    done = command("probe", tmp_path, *ONLY, "--device", f"{device}:0")
    names = [line.split("│")[1].strip() for line in done.out.splitlines() if line.startswith("│")]
    assert names[:7] == [
        "to use",
        'host_bytes="auto"',
        "host memory",
        "its address",
        "to the device",
        "from the device",
        "both at once",
    ]
    assert done.out.count("B/s") == 7


@pytest.mark.skipif(not EMULATED, reason="fills the device")
@pytest.mark.parametrize(("asked", "status"), [([], 0), (["--device", "npu:0"], 1)])
def test_a_device_that_is_full_does_not_keep_the_drive_from_being_measured(
    command: Command, tmp_path: Path, device_module: object, asked: list[str], status: int
) -> None:
    torch.npu.empty_cache()
    torch.npu.set_per_process_memory_fraction(0.01)
    try:
        done = command("probe", tmp_path, *ONLY, "--json", *asked)
    finally:
        torch.npu.set_per_process_memory_fraction(1.0)
    found = json.loads(done.out)
    assert found["link"]["problem"].startswith("the device has no 128 MiB left: ")
    assert found["drive"]["write"] > 0
    assert done.status == status
