"""Training goes on where the disk does not, and no wrong bytes come from it."""

from __future__ import annotations

import errno
import gc
import logging
import shutil
from pathlib import Path

import pytest

from tests.spill.faulty_files import FaultyFiles
from tests.spilling import MIB, SAVED, Spilling, Training, records_in, spill_all
from tiered_mem import TieringManager
from tiered_mem.errors import CorruptRecord, SpillDirRefused
from tiered_mem.policies import LayerOrderPolicy

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    pytest.mark.schedules("eager", why="what files do has no schedule"),
]
WRITES = ("create", "pwrite", "allocate", "truncate", "stat", "close")


@pytest.mark.parametrize(
    ("operation", "how"), [*((operation, errno.ENOSPC) for operation in WRITES), ("pwrite", errno.EIO)]
)
def test_a_write_that_fails_costs_no_number(
    operation: str, how: int, spilling: Spilling, training: Training
) -> None:
    files = FaultyFiles()
    manager = spilling(LayerOrderPolicy(), 6 * MIB, files=files)
    for skip in (0, 3):
        files.fail(operation, how, skip=skip)
        assert training.step(manager)
        files.heal()
        spilling.now += 100
    assert training.step(manager)


def test_a_disk_that_takes_nothing(
    spilling: Spilling, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles()
    manager = spilling(LayerOrderPolicy(), 6 * MIB, files=files)
    files.fail("pwrite", errno.ENOSPC, times=float("inf"))
    with caplog.at_level(logging.WARNING, "tiered_mem"):
        assert training.step(manager)
    stats = manager.stats()
    assert stats["disk.state"] == "failing"
    assert int(stats["disk.failures.total"]) > 0
    assert int(stats["kept.blocks.total"]) > 0, "what has no room below stays where it is"
    about_the_disk = [record for record in caplog.records if record.name == "tiered_mem.spill"]
    assert len(about_the_disk) == 1
    assert "No space left" in about_the_disk[0].getMessage()

    files.heal()
    assert training.step(manager)
    assert manager.stats()["spilled.blocks.total"] == 0, "it is left alone for a while"
    spilling.now += 100
    kept = manager.stats()["kept.blocks.total"]
    assert training.step(manager)
    assert int(manager.stats()["spilled.blocks.total"]) > 0
    assert manager.stats()["kept.blocks.total"] == kept
    assert manager.stats()["disk.state"] == "ok"


def test_what_failed_to_go_down_is_tried_again(spilling: Spilling, training: Training) -> None:
    files = FaultyFiles()
    manager = spilling(LayerOrderPolicy(), 64 * MIB, files=files)
    loss = training.forward(manager)
    files.fail("pwrite", times=float("inf"))
    spill_all(manager)
    assert manager.stats()["spilled.blocks.total"] == 0
    files.heal()
    spilling.now += 100
    spill_all(manager)
    assert manager.stats()["host.blocks.current"] == 0
    loss.backward()
    assert training.is_right()


def test_a_read_that_fails_stops_the_backward(spilling: Spilling, training: Training) -> None:
    files = FaultyFiles()
    manager = spilling(LayerOrderPolicy(), 64 * MIB, files=files)
    loss = training.forward(manager)
    spill_all(manager)
    files.fail("pread", times=float("inf"))
    with pytest.raises(OSError, match="Input/output error"):
        loss.backward(retain_graph=True)
    files.heal()
    training.model.zero_grad()
    gc.collect()  # the error knows the graph
    loss.backward()
    assert training.is_right(), "the files are as good as ever"


def test_a_directory_that_vanishes(spilling: Spilling, training: Training, tmp_path: Path) -> None:
    manager = spilling(LayerOrderPolicy(), 64 * MIB)
    loss = training.forward(manager)
    spill_all(manager)
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    with pytest.raises((CorruptRecord, OSError)):
        loss.backward()
    training.model.zero_grad()
    del loss
    gc.collect()
    assert training.step(manager)


def test_a_file_that_was_swapped_behind_our_back(spilling: Spilling, training: Training, tmp_path: Path) -> None:
    manager = spilling(LayerOrderPolicy(), 64 * MIB)
    loss = training.forward(manager)
    spill_all(manager)
    one, other, *_ = (path for path in records_in(tmp_path))
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)
    with pytest.raises(CorruptRecord):
        loss.backward()
    training.model.zero_grad()
    del loss
    gc.collect()
    assert training.step(manager)


def test_what_is_needed_comes_even_where_nothing_else_can_go(spilling: Spilling, training: Training) -> None:
    """The host is full of another graph's blocks, and the disk takes no more."""
    files = FaultyFiles()
    manager = spilling(LayerOrderPolicy(), SAVED, files=files)
    first = training.forward(manager)
    spill_all(manager)
    files.fail("pwrite", times=float("inf"))
    second = training.forward(manager)
    spilling.now += 1e9
    first.backward()
    assert training.is_right()
    second.backward()
    assert training.is_right()
    stats = manager.stats()
    assert int(stats["disk.overflows.total"]) > 0
    assert int(stats["blocking.copies.total"]) >= int(stats["disk.overflows.total"]), "that memory is not pinned"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"spill_dir": "missing"}, SpillDirRefused, "missing"),
        ({"spill_dir": "file"}, SpillDirRefused, "file"),
        ({"spill_dir": ".", "spill_bytes": "1000TiB"}, ValueError, r"1000\.0 TiB"),
        ({"spill_dir": ".", "spill_bytes": 4096}, ValueError, "4096"),
        ({"spill_dir": ".", "spill_checksum": "md5"}, ValueError, "md5"),
        ({"spill_bytes": "1GiB"}, ValueError, "needs a spill_dir"),
    ],
)
def test_a_tier_that_cannot_be(
    arguments: dict[str, str],
    error: type[Exception],
    words: str,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(error, match=words):
        TieringManager(policy="layer-order", device=device, host_bytes="4MiB", **arguments)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_tier_that_no_block_fits_into(device: str, tmp_path: Path) -> None:
    with TieringManager(
        policy="layer-order", device=device, host_bytes="4MiB", spill_dir=tmp_path, spill_bytes="64KiB"
    ) as manager:
        model = Training(device).model
        with pytest.raises(ValueError, match=r"spill_bytes is 64\.0 KiB, .* min_bytes, which is 1\.0 MiB"):
            manager.offload_context(model.layers)
        with pytest.raises(ValueError, match="none would fit"):
            manager.layer_context(2)
        manager.offload_context(model.layers, min_bytes="32KiB")
