"""On folders that look like /sys/fs/cgroup of both versions."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tiered_mem.host_limit import HostLimit, host_limit

V1, V2 = "memory.limit_in_bytes", "memory.max"
V1_UNLIMITED = str(2**63 - 4096)
RAM = HostLimit(psutil.virtual_memory().total, "the machine's RAM")


def limit_of(tmp_path: Path, membership: str, files: dict[str, str]) -> HostLimit:
    """What a process with this /proc/self/cgroup may use, where the cgroup tree has these files."""
    proc = tmp_path / "self_cgroup"
    proc.write_text(membership)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return host_limit(tmp_path / "cgroup", proc)


def cgroup(tmp_path: Path, nbytes: int, file: str) -> HostLimit:
    return HostLimit(nbytes, f"the cgroup limit {tmp_path / 'cgroup' / file}")


@pytest.mark.parametrize(
    ("files", "smallest"),
    [
        ({f"pod/job/{V2}": "4096"}, f"pod/job/{V2}"),
        ({f"pod/{V2}": "4096"}, f"pod/{V2}"),
        ({f"pod/{V2}": "4096", f"pod/job/{V2}": "max"}, f"pod/{V2}"),
        ({f"pod/{V2}": "max", f"pod/job/{V2}": "4096"}, f"pod/job/{V2}"),
        ({f"pod/{V2}": "4096", f"pod/job/{V2}": "8192"}, f"pod/{V2}"),
        ({f"pod/{V2}": "8192", f"pod/job/{V2}": "4096"}, f"pod/job/{V2}"),
        ({V2: "4096"}, V2),  # a container that sees its own cgroup at the top, and its path from outside
    ],
)
def test_v2_the_smallest_limit_on_the_way_up_holds(tmp_path: Path, files: dict[str, str], smallest: str) -> None:
    assert limit_of(tmp_path, "0::/pod/job\n", files) == cgroup(tmp_path, 4096, smallest)


def test_v2_at_the_top_of_the_tree(tmp_path: Path) -> None:
    assert limit_of(tmp_path, "0::/\n", {V2: "4096"}) == cgroup(tmp_path, 4096, V2)


def test_v2_a_path_may_hold_a_colon(tmp_path: Path) -> None:
    file = f"a:b/{V2}"
    assert limit_of(tmp_path, "0::/a:b\n", {file: "4096"}) == cgroup(tmp_path, 4096, file)


@pytest.mark.parametrize("controllers", ["memory", "cpu,memory"])
@pytest.mark.parametrize("folder", ["memory/docker/job", "memory/docker", "memory"])
def test_v1_has_a_tree_for_memory(tmp_path: Path, controllers: str, folder: str) -> None:
    membership = f"5:cpuset:/docker/job\n4:{controllers}:/docker/job\n1:name=systemd:/docker/job\n"
    files = {f"{folder}/{V1}": "4096", f"cpuset/docker/job/{V1}": "1", f"docker/job/{V1}": "1", V1: "1"}
    assert limit_of(tmp_path, membership, files) == cgroup(tmp_path, 4096, f"{folder}/{V1}")


def test_both_versions_at_once(tmp_path: Path) -> None:
    files = {f"memory/job/{V1}": "8192", f"job/{V2}": "4096"}
    assert limit_of(tmp_path, "4:memory:/job\n0::/job\n", files) == cgroup(tmp_path, 4096, f"job/{V2}")


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("", {}),
        ("0::/job\n", {}),
        ("0::/job\n", {f"job/{V2}": "max", V2: "max"}),
        ("0::/job\n", {f"job/{V2}": str(1 << 62)}),
        ("4:memory:/job\n", {f"memory/job/{V1}": V1_UNLIMITED, f"memory/{V1}": V1_UNLIMITED}),
        ("0::/job\n", {f"other/{V2}": "4096", f"job/child/{V2}": "4096"}),
        ("5:cpuset:/job\n", {f"memory/job/{V1}": "4096"}),
    ],
)
def test_without_a_limit_it_is_the_machines_ram(tmp_path: Path, membership: str, files: dict[str, str]) -> None:
    assert limit_of(tmp_path, membership, files) == RAM


def test_nothing_above_the_tree_is_read(tmp_path: Path) -> None:
    (tmp_path / V2).write_text("4096\n")
    assert limit_of(tmp_path, "0::/job\n", {}) == RAM


def test_a_machine_without_cgroups(tmp_path: Path) -> None:
    assert host_limit(tmp_path / "cgroup", tmp_path / "self_cgroup") == RAM


def test_this_machine() -> None:
    assert 0 < host_limit().nbytes <= RAM.nbytes
