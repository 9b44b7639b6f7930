"""A manager's part in what ranks share: when there is one, of which job, and how pools and files keep to it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.allocators.numbered_memory import NumberedMemory
from tests.spill.disks import MIB, disk_in
from tests.spill.memory import noise
from tests.tiers.test_node_share import in_a_process
from tiered_mem import TieringManager
from tiered_mem.allocators import SlabPool
from tiered_mem.allocators.base import OutOfHostMemory
from tiered_mem.errors import TierFull
from tiered_mem.spill.room import Room
from tiered_mem.spill.write_gate import WriteBudget
from tiered_mem.tiers.node_budget import NodeBudget, job_of
from tiered_mem.tiers.node_memory import NodeMemory

pytestmark = pytest.mark.once(why="it needs no device")

JOB = {"TORCHELASTIC_RUN_ID": "7", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """This is one of 4 ranks of a job of its own."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_PORT", str(tmp_path))
    monkeypatch.setenv("TIERED_MEM_HOST_LIMIT", "128MiB")
    yield
    gc.collect()


def make(**arguments: object) -> TieringManager:
    return TieringManager(policy="layer-order", device="cpu", **arguments)  # type: ignore[arg-type]


def test_a_job_is_known_by_what_its_launcher_says() -> None:
    ours = job_of(JOB, 8)
    assert ours == job_of({**JOB, "LOCAL_RANK": "3", "RANK": "11"}, 8)
    others = [job_of({**JOB, name: "x"}, 8) for name in JOB]
    assert len({ours, *others}) == 4
    assert job_of({}, 8) == job_of({}, 8)
    assert job_of({}, 8) != job_of({}, 1), "which is this process alone"


def test_ranks_share_host_memory_where_nothing_is_said(ranks: None) -> None:
    with make() as manager, make(host_bytes="auto") as other, make(host_bytes="4MiB") as alone:
        stats = manager.stats()
        assert stats["host.capacity"] == stats["node.bytes"] == 64 * MIB
        assert (stats["node.floor"], stats["node.ranks"], stats["node.used"]) == (4 * MIB, 1, 0)
        assert other.stats()["node.bytes"] == 64 * MIB
        assert not [name for name in alone.stats() if name.startswith("node.")]
        assert alone.stats()["host.capacity"] == 4 * MIB


def test_what_managers_have_alone_is_not_there_to_be_shared(ranks: None) -> None:
    with make(host_bytes="16MiB", preallocate=False), make() as manager:
        assert manager.stats()["node.bytes"] == 4 * (32 - 16) // 2 * MIB
        with pytest.raises(ValueError, match=r"at most 8388608 bytes \(8\.0 MiB\)"):
            make(host_bytes="9MiB")
        make(host_bytes="8MiB", preallocate=False).close()


def test_one_process_without_a_launcher_shares_only_where_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with make() as manager:
        assert "node.bytes" not in manager.stats()
    with make(node_bytes="8MiB") as one, make(node_bytes="8MiB", host_bytes="3MiB") as other:
        assert (one.stats()["node.used"], other.stats()["node.own"]) == (3 * MIB, 3 * MIB)
        with pytest.raises(TierFull, match=r"needed 6\.0 MiB, free 3\.0 MiB, .* share 8\.0 MiB .* has 3\.0 MiB"):
            make(node_bytes="8MiB", host_bytes="6MiB")
        assert one.stats()["node.ranks"] == 1
        with pytest.raises(ValueError, match=r"host_bytes='9MiB' is 9\.0 MiB, more than node_bytes='8MiB' allows"):
            make(node_bytes="8MiB", host_bytes="9MiB")
    with pytest.raises(ValueError, match="node_bytes='900TiB' is 900"):
        make(node_bytes="900TiB")
    with pytest.raises(ValueError, match="host_pool comes in place of node_bytes"):
        make(node_bytes="8MiB", host_pool=SlabPool(NumberedMemory()))


def test_a_part_may_be_taken_at_once(ranks: None) -> None:
    with make(preallocate=True) as manager:
        assert manager.stats()["node.own"] == manager.stats()["node.floor"] == 16 * MIB
    with make(node_bytes="32MiB", host_bytes=0.25) as manager:
        assert manager.stats()["node.own"] == manager.stats()["host.reserved.current"] == 8 * MIB


def test_a_closed_or_forgotten_manager_has_nothing(ranks: None) -> None:
    with make() as watcher:
        make(preallocate=True).close()
        assert watcher.stats()["node.used"] == 0
        manager = make(preallocate=True)
        assert watcher.stats()["node.used"] == 16 * MIB
        del manager
        gc.collect()
        assert watcher.stats()["node.used"] == 0
        with pytest.raises(ValueError, match="pin='no'"):
            make(pin="no")
        assert watcher.stats()["node.ranks"] == 1


def test_a_pool_takes_from_the_share_and_gives_back(tmp_path: Path, ranks: None) -> None:
    one, other = (NodeBudget(folder=tmp_path) for _ in range(2))
    pools = []
    for budget in (one, other):
        share = budget.share_host(16 * MIB, most=16 * MIB, now=False)
        pools.append(SlabPool(NodeMemory(NumberedMemory(), share), slab_bytes=MIB, capacity=16 * MIB))
        budget.watch(pools[-1])
    assert pools[0].stats().source == "NumberedMemory"
    there = 16 * MIB - 3 * MIB - MIB  # less the floors of 3 ranks and the other manager
    regions = [pools[0].allocate(MIB) for _ in range(there // MIB)]
    with pytest.raises(OutOfHostMemory, match="this machine's ranks leave no more") as refused:
        pools[0].allocate(MIB)
    assert isinstance(refused.value.__cause__, OutOfHostMemory)
    assert (refused.value.__cause__.free, refused.value.__cause__.used) == (0, there)
    floor = pools[1].allocate(MIB)
    with pytest.raises(OutOfHostMemory):
        pools[1].allocate(MIB)
    for region in regions:
        pools[0].deallocate(region)
    for _ in range(31):  # forwards that might need the slabs again
        one.begin_step()
    assert one.stats()["node.own"] == there
    other.begin_step()
    with pytest.raises(OutOfHostMemory):
        pools[1].allocate(MIB)
    one.begin_step()
    assert one.stats()["node.own"] == there - MIB, "as much as is wanted"
    pools[1].deallocate(pools[1].allocate(MIB))
    pools[1].deallocate(floor)
    for pool in pools:
        pool.close()
    assert other.stats()["node.used"] == 0


def test_a_source_that_fails_gives_the_share_back(tmp_path: Path, ranks: None) -> None:
    source = NumberedMemory()
    budget = NodeBudget(folder=tmp_path)
    pool = SlabPool(NodeMemory(source, budget.share_host(16 * MIB, most=16 * MIB, now=False)))
    source.refuse = RuntimeError("no")
    with pytest.raises(OutOfHostMemory):
        pool.allocate(MIB)
    assert budget.stats()["node.used"] == 0


def test_the_error_of_a_full_machine_says_who_has_what(ranks: None) -> None:
    first, manager = make(node_bytes="16MiB", host_bytes="9MiB"), make(node_bytes="16MiB")
    with first, manager, pytest.raises(TierFull) as full:
        manager.register_optimizer(adam(8 * MIB))
    assert full.value.limit == 16 * MIB - 9 * MIB - 3 * MIB
    assert f"the ranks of this machine share 16.0 MiB (process {os.getpid()} has" in str(full.value)


def adam(nbytes: int) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.zeros(nbytes // 8))
    return torch.optim.Adam([parameter])


def test_files_of_all_ranks_keep_to_one_limit(tmp_path: Path, ranks: None) -> None:
    (tmp_path / "spill").mkdir()
    one, other = (NodeBudget("1MiB", node_spill_bytes="16MiB", folder=tmp_path / "node") for _ in range(2))
    assert other.spill is not None
    size = MIB - 4096  # with a header it is a file of 1 MiB
    with disk_in(tmp_path / "spill", room=Room(16 * MIB, one.spill)) as disk:
        records = [disk.put(noise(size)) for _ in range(12)]  # all but the floors
        assert disk.tier.stats().reserved == one.stats()["node.spill.used"] == 12 * MIB
        assert not disk.tier.accepts(size)
        with pytest.raises(TierFull, match=r"disk tier: needed 1\.0 MiB, free 0 B, .*raise node_spill_bytes"):
            disk.write(noise(size))
        assert other.spill.take(MIB)
        disk.tier.release(records[0])
        assert not other.spill.take(1), "a file that waits to be used again is there"
        assert disk.get(disk.put(noise(size, 2))) == [noise(size, 2)]
        disk.tier.release(records[1])
        disk.tier.release(records[2])
        grown = disk.put(noise(size + MIB, 3))  # for which one is removed, and one becomes longer
        assert disk.get(grown) == [noise(size + MIB, 3)]
        assert one.stats()["node.spill.own"] == disk.tier.stats().reserved == disk.real_bytes() == 12 * MIB
        disk.tier.release(grown)
        smaller = disk.put(noise(size, 4))  # in the longer file, which becomes shorter
        assert one.stats()["node.spill.own"] == disk.real_bytes() == 11 * MIB
        disk.files.fail("pwrite", times=1)
        disk.refused(noise(size, 5))
        assert one.stats()["node.spill.own"] == disk.real_bytes() == 11 * MIB
        assert disk.get(smaller) == [noise(size, 4)]


def test_what_all_ranks_write_keeps_to_one_budget(tmp_path: Path, ranks: None) -> None:
    (tmp_path / "spill").mkdir()
    one, other = (NodeBudget("1MiB", node_spill_write_budget="4MiB", folder=tmp_path / "node") for _ in range(2))
    assert other.writes is not None
    with disk_in(tmp_path / "spill", write_budget=WriteBudget(None, one.writes)) as disk:
        disk.tier.release(disk.put(noise(MIB - 4096)))
        assert other.writes.take(MIB)
        disk.tier.release(disk.put(noise(MIB - 4096)))
        written = disk.tier.stats().written
        assert one.stats()["node.writes.used"] == written + MIB
        assert one.stats()["node.writes.own"] == written
        assert not disk.tier.accepts(MIB)
        assert disk.tier.stats().state == "budget spent"
        with pytest.raises(TierFull, match=r"of the 4\.0 MiB that the ranks of this machine may write, 3\.0 MiB"):
            disk.write(noise(MIB))
        assert disk.tier.stats().reserved == disk.real_bytes()


def test_what_is_said_of_disks_needs_one(tmp_path: Path) -> None:
    for argument in ("node_spill_bytes", "node_spill_write_budget"):
        with pytest.raises(ValueError, match="begins with spill or node_spill describes a disk tier"):
            make(**{argument: "1GiB"})
        with pytest.raises(ValueError, match=f"{argument}: 'much' is not a size"):
            make(**{argument: "much"}, spill_dir=tmp_path)
    with make(spill_dir=tmp_path, node_spill_bytes="8MiB", node_spill_write_budget="1GiB") as manager:
        assert manager.stats()["disk.capacity"] == manager.stats()["node.spill.bytes"] == 8 * MIB
        summary = manager.memory_summary()
        assert "disk of all ranks / limit     0 B / 8.0 MiB" in summary
        assert "written by all / limit        0 B / 1.0 GiB" in summary


@pytest.mark.parametrize("trouble", ["a file", "others may enter", "no room"])
def test_without_the_file_each_rank_keeps_to_an_equal_part_and_says_so(trouble: str, tmp_path: Path) -> None:
    """Where there is no room for it, nobody is killed for writing to what is not there."""
    folder = tmp_path / "node"
    if trouble == "a file":
        folder.touch()
    else:
        folder.mkdir(0o755 if trouble == "others may enter" else 0o700)
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))" if trouble == "no room" else ""
    found = in_a_process(
        f"""
        import logging
        from tiered_mem.tiers.node_budget import NodeBudget
        logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
        {limit}
        budget = NodeBudget(node_spill_bytes="1GiB", folder=Path({str(folder)!r}))
        share = budget.share_host(1000, most=1000, now=False)
        print(share.take(250), share.take(1), budget.spill.limit, budget.stats()["node.bytes"])
        budget.begin_step()
        budget.leave()
        """,
        LOCAL_WORLD_SIZE="4",
    )
    warning, result = found.splitlines()
    assert warning.startswith(
        "WARNING the ranks of this machine cannot share what it has, and each keeps to an equal"
    )
    assert result == f"True False {1 << 28} 250"


def test_a_manager_without_the_file_has_an_equal_part(
    ranks: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*arguments: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr("tiered_mem.tiers.node_budget.NodeFile", none)
    with make() as manager:
        assert manager.stats()["host.capacity"] == 16 * MIB
    assert caplog.text.count("cannot share what it has") == 1
