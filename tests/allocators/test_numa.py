"""Which node a PCI device is attached to, read off a tree like sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered_mem.allocators.pages import node_of_pci


def attach(root: Path, bus_id: str, numa_node: str) -> None:
    (root / bus_id).mkdir()
    (root / bus_id / "numa_node").write_text(numa_node)


def test_the_node_of_a_device_is_read(tmp_path: Path) -> None:
    attach(tmp_path, "0000:3d:00.0", "0\n")
    attach(tmp_path, "0001:81:1f.7", "3\n")
    assert node_of_pci("0000:3d:00.0", tmp_path) == 0
    assert node_of_pci("0001:81:1f.7", tmp_path) == 3


def test_an_address_may_be_written_as_cuda_writes_it(tmp_path: Path) -> None:
    attach(tmp_path, "0000:3d:00.0", "1\n")
    assert node_of_pci("00000000:3D:00.0", tmp_path) == 1
    assert node_of_pci("0:3d:0.0", tmp_path) == 1


@pytest.mark.parametrize("written", ["-1\n", "", "none\n"])
def test_a_node_that_the_system_does_not_know_is_none(tmp_path: Path, written: str) -> None:
    attach(tmp_path, "0000:3d:00.0", written)
    assert node_of_pci("0000:3d:00.0", tmp_path) is None


def test_a_device_that_is_not_there_has_no_node(tmp_path: Path) -> None:
    assert node_of_pci("0000:3d:00.0", tmp_path) is None
    assert node_of_pci("0000:3d:00.0", tmp_path / "nothing") is None


@pytest.mark.parametrize("text", ["", "3d:00.0", "../../0000:3d:00.0", "0000:3d:00.8", "0000:3d:00.0/.."])
def test_what_is_not_an_address_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="is not a PCI address"):
        node_of_pci(text, tmp_path)
