"""Limits, on folders that look like /sys/fs/cgroup of both versions, and on files like those of /proc."""

from __future__ import annotations

import ctypes
import mmap
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tiered_mem.tiers.host_budget import HostLimit, cgroup_limits, host_budget, host_limit, memlock_limit
from tiered_mem.tiers.pinning import offered_host

pytestmark = pytest.mark.once(why="it needs no device")

V1, V2 = "memory.limit_in_bytes", "memory.max"
V1_UNLIMITED = str(2**63 - 4096)
V1_UNLIMITED_64K_PAGES = str(2**63 - 65536)
RAM = HostLimit(psutil.virtual_memory().total, "the machine's RAM")


def make_cgroups(tmp_path: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A cgroup tree with these files, and a /proc/self/cgroup in it."""
    proc = tmp_path / "self_cgroup"
    proc.write_text(membership)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return tmp_path / "cgroup", proc


def limit_of(tmp_path: Path, membership: str, files: dict[str, str]) -> HostLimit:
    """What a process with this /proc/self/cgroup may use, where the cgroup tree has these files."""
    return host_limit(*make_cgroups(tmp_path, membership, files))


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


def test_what_the_user_says_counts_in_place_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERED_MEM_HOST_LIMIT", "900TiB")
    said = "TIERED_MEM_HOST_LIMIT=900TiB in the environment"
    assert host_limit() == HostLimit(900 << 40, said)
    with pytest.raises(ValueError, match=f"more than {said} allows"):
        host_budget("901TiB", limits=[host_limit()], processes=1)


def test_a_machine_that_a_package_models_counts_before_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, nbytes in {"nothing": None, "server": 900 << 40}.items():
        about = tmp_path / f"{name}-0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        (about / "entry_points.txt").write_text(f"[tiered_mem.hosts]\n{name} = modelling_{name}:memory\n")
        (tmp_path / f"modelling_{name}.py").write_text(f"def memory(): return {nbytes}\n")
    assert offered_host() is None
    monkeypatch.syspath_prepend(tmp_path)
    modelled = offered_host()
    assert modelled == HostLimit(900 << 40, "the memory of the machine that modelling_server models")
    assert host_limit(modelled=modelled) == modelled
    monkeypatch.setenv("TIERED_MEM_HOST_LIMIT", "1GiB")
    assert host_limit(modelled=modelled).nbytes == 1 << 30


@pytest.mark.parametrize("text", ["much", "0", "-1GiB"])
def test_what_the_user_says_must_be_a_size(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TIERED_MEM_HOST_LIMIT", text)
    with pytest.raises(ValueError, match=r"^TIERED_MEM_HOST_LIMIT in the environment: .*size"):
        host_limit()


@pytest.mark.parametrize("unlimited", [V1_UNLIMITED, V1_UNLIMITED_64K_PAGES, str(2**63 - 1)])
def test_v1_without_a_limit_has_a_number_all_the_same(tmp_path: Path, unlimited: str) -> None:
    files = {f"memory/pod/job/{V1}": unlimited, f"memory/pod/{V1}": "4096", f"memory/{V1}": unlimited}
    limits = cgroup_limits(*make_cgroups(tmp_path, "4:memory:/pod/job\n", files))
    assert limits == [cgroup(tmp_path, 4096, f"memory/pod/{V1}")]


def test_each_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {f"memory/pod/job/{V1}": "8192", f"memory/{V1}": "4096", f"pod/{V2}": "1024", V2: "max"}
    limits = cgroup_limits(*make_cgroups(tmp_path, "4:memory:/pod/job\n0::/pod/job\n", files))
    named = {f"memory/pod/job/{V1}": 8192, f"memory/{V1}": 4096, f"pod/{V2}": 1024}
    assert limits == [cgroup(tmp_path, nbytes, file) for file, nbytes in named.items()]


NOTHING, LOCK_ONLY, ALL_BUT_LOCK, ALL = 0, 1 << 14, 0x1FFFFFFBFFF, 0x1FFFFFFFFFF


@pytest.fixture
def soft_limit() -> Iterator[int]:
    """A soft limit on locked memory that this process has during the test."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, before[1]))
    yield 4096
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def status(tmp_path: Path, effective: int) -> Path:
    """A /proc/self/status of a process that may do this, and has been given more or less."""
    path = tmp_path / "status"
    others = f"CapInh:\t{ALL:016x}\nCapPrm:\t{ALL ^ effective:016x}\n", f"CapBnd:\t{ALL ^ effective:016x}\n"
    path.write_text(f"Name:\tCapEff:\nVmLck:\t       0 kB\n{others[0]}CapEff:\t{effective:016x}\n{others[1]}")
    return path


@pytest.mark.parametrize("effective", [NOTHING, ALL_BUT_LOCK])
def test_the_soft_limit_on_locked_memory_holds_for_each_process(
    tmp_path: Path, soft_limit: int, effective: int
) -> None:
    expected = HostLimit(soft_limit, "RLIMIT_MEMLOCK (ulimit -l)", per_process=True)
    assert memlock_limit(status(tmp_path, effective)) == expected


@pytest.mark.usefixtures("soft_limit")
@pytest.mark.parametrize("effective", [LOCK_ONLY, ALL])
def test_who_may_lock_memory_has_no_limit_on_it(tmp_path: Path, effective: int) -> None:
    assert memlock_limit(status(tmp_path, effective)) is None


def test_an_unlimited_soft_limit_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_MEMLOCK: unlimited}.__getitem__)
    assert memlock_limit(status(tmp_path, NOTHING)) is None


def test_without_capabilities_to_read_the_limit_holds(tmp_path: Path, soft_limit: int) -> None:
    assert memlock_limit(tmp_path / "status") is not None
    (tmp_path / "status").write_text("Name:\tpython\n")
    assert memlock_limit(tmp_path / "status") is not None


def test_the_kernel_locks_more_than_the_limit_only_where_there_is_none(soft_limit: int) -> None:
    with mmap.mmap(-1, 16 * soft_limit) as mapping:
        room = (ctypes.c_char * len(mapping)).from_buffer(mapping)
        refused = ctypes.CDLL(None).mlock(ctypes.c_void_p(ctypes.addressof(room)), ctypes.c_size_t(len(mapping)))
        del room
    assert (refused == 0) == (memlock_limit() is None)
