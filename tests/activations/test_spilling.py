"""Blocks that go on from host memory to disk, and come back in time."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.activations.saving import Apply, leaf
from tests.models import allocated, backward, equal, eventually, is_empty
from tests.service import view_of_all
from tests.spill.declared_files import DeclaredFiles
from tests.spilling import MIB, SAVED, Spilling, Training, files_in, keys, records_in, spill_all
from tiered_mem import Closed, TieringManager
from tiered_mem.errors import CorruptRecord
from tiered_mem.policies import (
    Fetch,
    LayerOrderPolicy,
    Link,
    LRUPolicy,
    ManualPolicy,
    Offload,
    PlannedPolicy,
    Policy,
    Release,
    Reload,
    Spill,
    SynchronizationDictPolicy,
)

pytestmark = pytest.mark.usefixtures("no_gc")

POLICIES: dict[str, Callable[[], Policy]] = {
    "layer order": LayerOrderPolicy,
    "layer order, three layers, one in flight": lambda: LayerOrderPolicy(3, in_flight=1),
    "LRU": lambda: LRUPolicy(device_bytes=8 * MIB),
    "LRU, no device memory": lambda: LRUPolicy(device_bytes=1),
    "planned": lambda: PlannedPolicy(allocated() + 24 * MIB, Link(1e9, 1e9)),
    "by dictionary": lambda: SynchronizationDictPolicy({0: (True, 1, True, 2), 1: (True, 2, True, 3)}),
}


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25, 0.05])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_with_little_host_memory(
    policy: str, share: float, spilling: Spilling, training: Training
) -> None:
    manager = spilling(POLICIES[policy](), max(int(share * SAVED), 2 * MIB))
    for _ in range(2):
        assert training.step(manager)
    stats = manager.stats()
    assert int(stats["offloaded.bytes.total"]) > 0
    assert stats["kept.bytes.total"] == 0, "there was room on disk"
    assert stats["disk.overflows.total"] == 0
    assert int(stats["host.used.peak"]) <= int(stats["host.capacity"])
    if share <= 0.25 and policy != "by dictionary":
        assert int(stats["spilled.bytes.total"]) > 0
        assert int(stats["fetched.bytes.total"]) > 0


def test_a_block_that_is_wanted_while_it_is_written(spilling: Spilling, training: Training) -> None:
    """Its slot still has the bytes; the file is given up."""
    files = DeclaredFiles()
    manager = spilling(LayerOrderPolicy(), 64 * MIB, files=files)
    files.hold = True
    loss = training.forward(manager)
    torch.accelerator.synchronize()
    manager.act(Spill(key) for key in keys(manager))
    manager.stats()  # finds that the copies to the host have ended
    assert files.arrived.wait(10)
    loss.backward()
    assert training.is_right()
    assert manager.stats()["fetched.blocks.total"] == 0
    assert int(manager.stats()["host.used.current"]) > 0, "files are being written from it"
    files.let_go()
    assert eventually(lambda: is_empty(manager))
    assert manager.stats()["disk.records"] == 0


def reading(spilling: Spilling, training: Training) -> tuple[TieringManager, DeclaredFiles, torch.Tensor]:
    """A manager whose blocks are being read, the files that hold that up, and the loss that needs them."""
    files = DeclaredFiles()
    manager = spilling(LayerOrderPolicy(), 64 * MIB, files=files)
    loss = training.forward(manager)
    spill_all(manager)
    files.hold = True
    manager.act(Fetch(key) for key in keys(manager))
    assert files.arrived.wait(10)
    return manager, files, loss


def test_a_block_that_is_dropped_while_it_is_read(spilling: Spilling, training: Training) -> None:
    manager, files, loss = reading(spilling, training)
    del loss
    assert int(manager.stats()["host.used.current"]) > 0, "a file is being read into it"
    files.let_go()


def test_closing_while_a_file_is_read(spilling: Spilling, training: Training) -> None:
    """Nobody looks any more whether the read has ended, and the slot that it goes to is free all the same."""
    manager, files, loss = reading(spilling, training)
    files.let_go()
    manager.close()
    del loss


def test_the_last_of_many_reads_is_wanted_first(spilling: Spilling, device: str) -> None:
    """More are under way than one look takes note of."""
    manager = spilling(ManualPolicy(), 64 * MIB)
    layer, x = Apply(lambda y: functools.reduce(lambda z, _: z.sin(), range(60), y)), leaf(device)
    expected = backward(layer(x).sum(), x)
    with manager.offload_context([layer], min_bytes=1):
        loss = layer(x).sum()
    manager.act([*map(Offload, keys(manager)), *map(Release, keys(manager))])
    manager.synchronize()
    for key in keys(manager):
        manager.act([Spill(key)])  # into a record of its own
    manager.synchronize()
    assert manager.stats()["disk.records"] == 60
    manager.act(Fetch(key) for key in keys(manager))
    assert equal(backward(loss, x), expected)


def test_what_was_fetched_too_early_goes_down_without_being_written_again(
    spilling: Spilling, training: Training
) -> None:
    manager = spilling(LayerOrderPolicy(), 64 * MIB)
    loss = training.forward(manager)
    spill_all(manager)
    written = manager.stats()["disk.written.total"]
    assert manager.stats()["host.used.current"] == 0
    manager.act(Fetch(key) for key in keys(manager))
    manager.synchronize()
    assert int(manager.stats()["host.used.current"]) > 0
    spill_all(manager)
    assert manager.stats()["host.used.current"] == 0
    loss.backward()
    assert training.is_right()
    assert manager.stats()["disk.written.total"] == written


def test_two_backwards_through_one_graph(spilling: Spilling, training: Training) -> None:
    manager = spilling(LayerOrderPolicy(), 4 * MIB)
    loss = training.forward(manager)
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert training.is_right()


def test_a_forward_without_a_backward(spilling: Spilling, training: Training) -> None:
    manager = spilling(LayerOrderPolicy(), 4 * MIB)
    loss = training.forward(manager)
    assert int(manager.stats()["disk.blocks.current"]) > 0
    del loss
    assert training.step(manager)


def test_an_exception_in_a_forward(spilling: Spilling, training: Training) -> None:
    manager = spilling(LayerOrderPolicy(), 4 * MIB)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    hook = training.model.layers[3].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        training.forward(manager)
    hook.remove()
    gc.collect()
    assert training.step(manager)


def test_a_record_that_was_changed_stops_the_backward(
    spilling: Spilling, training: Training, tmp_path: Path
) -> None:
    manager = spilling(LayerOrderPolicy(), 64 * MIB)
    loss = training.forward(manager)
    spill_all(manager)
    for path in records_in(tmp_path):
        with path.open("r+b") as file:
            file.seek(-5000, 2)
            byte = file.read(1)
            file.seek(-5000, 2)
            file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CorruptRecord, match=r"expected .* found"):
        loss.backward()
    training.model.zero_grad()
    del loss
    gc.collect()
    assert training.step(manager)


def test_the_files_go_with_the_manager(training: Training, device: str, tmp_path: Path) -> None:
    manager = TieringManager(policy=LayerOrderPolicy(), device=device, host_bytes="4MiB", spill_dir=tmp_path)
    loss = training.forward(manager)
    spill_all(manager)
    assert records_in(tmp_path)
    manager.close()
    assert files_in(tmp_path) == []
    with pytest.raises(Closed, match="the activations with it"):
        loss.backward()


def test_a_manager_that_is_forgotten_leaves_no_file(training: Training, device: str, tmp_path: Path) -> None:
    manager = TieringManager(policy=LayerOrderPolicy(), device=device, host_bytes="4MiB", spill_dir=tmp_path)
    loss = training.forward(manager)
    gone = weakref.ref(manager)
    del manager
    assert records_in(tmp_path)
    del loss
    assert eventually(lambda: gone() is None)
    assert files_in(tmp_path) == []


def test_managers_share_a_directory(training: Training, device: str, tmp_path: Path) -> None:
    with (
        TieringManager(policy="layer-order", device=device, host_bytes="4MiB", spill_dir=tmp_path) as one,
        TieringManager(policy="lru", device=device, host_bytes="4MiB", spill_dir=str(tmp_path)) as other,
    ):
        assert training.step(one)
        assert training.step(other)
        loss = training.forward(one)
        other.close()
        loss.backward()
        assert training.is_right()


def test_actions_for_the_disk_mean_nothing_without_one(training: Training, device: str) -> None:
    with TieringManager(policy=LayerOrderPolicy(), device=device, host_bytes="64MiB") as manager:
        loss = training.forward(manager)
        spill_all(manager)
        manager.act(Fetch(key) for key in keys(manager))
        assert int(manager.stats()["host.blocks.current"]) > 0
        assert "disk.state" not in manager.stats()
        loss.backward()
        assert training.is_right()


def test_a_block_that_is_leaving_may_go_down_before_it_is_released(spilling: Spilling, device: str) -> None:
    manager = spilling(ManualPolicy(), 16 * MIB)
    tensor = torch.randn(MIB // 4).to(device)
    expected, view = tensor.cpu(), view_of_all(tensor)
    block, _ = manager._activations.save(tensor, graph=0, layer=0)
    del tensor
    manager.act([Offload(block.key), Spill(block.key)])
    manager.synchronize()
    assert manager.stats()["host.used.current"] == 0
    manager.act([Release(block.key)])
    assert manager.stats()["disk.blocks.current"] == 1
    manager.act([Reload(block.key)])
    assert torch.equal(manager._activations.load(block, view).cpu(), expected)
    manager._activations.dropped.append(block)
    manager._activations.free_dropped()
