"""Spill folders with records in them, of live processes and of dead ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.spill.folders import leave_dead
from tests.spill.records import Sample, sample
from tiered_mem.spill.folder import SpillFolder

SAMPLE = sample(("block.17", "bfloat16", 10_000), ("block.18", "float32", 4096), algorithm="crc32")
either = pytest.mark.parametrize("alive", [True, False], ids=["alive", "dead"])


@contextmanager
def owner(spill_dir: Path, *, alive: bool) -> Iterator[Path]:
    """An empty folder of a process that is alive, or is dead."""
    if alive:
        with closing(SpillFolder(spill_dir, run="live")) as folder:
            yield folder.path
    else:
        path = leave_dead(spill_dir)
        (path / "a").unlink()
        yield path


def put(folder: Path, record: Sample = SAMPLE, name: str = "000000.safetensors") -> Path:
    path = folder / name
    path.write_bytes(record.data)
    return path


def change(path: Path, offset: int, content: bytes | None = None) -> None:
    """Other bytes there, or one bit."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, content or bytes([os.pread(fd, 1, offset)[0] ^ 1]), offset)
    finally:
        os.close(fd)
