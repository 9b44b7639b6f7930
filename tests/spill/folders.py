"""Spill folders for tests, and what is in them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tiered_mem.spill.folder import SpillFolder

HOME = f"tiered_mem-{os.geteuid()}"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


def write(folder: SpillFolder, name: str, content: bytes) -> None:
    fd = folder.create(name)
    os.write(fd, content)
    os.close(fd)


def leave_dead(spill_dir: Path, *, going: bool = False, **owner: object) -> Path:
    """The folder of a dead process: one with an owner file that nobody has locked."""
    with closing(SpillFolder(spill_dir, run="dead")) as folder:
        write(folder, "a", b"12345")
        path = folder.path.with_name("dead-17-" + "0" * 16 + ".going" * going)
        shutil.copytree(folder.path, path)
    said = json.loads((path / "owner").read_text())
    (path / "owner").write_text(json.dumps(said | owner))
    return path


def tree(path: Path) -> set[str]:
    return {str(each.relative_to(path)) for each in path.rglob("*")}


@contextmanager
def nothing_new(spill_dir: Path) -> Iterator[None]:
    """Neither files below spill_dir, nor open ones."""
    before = tree(spill_dir), len(os.listdir("/proc/self/fd"))
    yield
    assert (tree(spill_dir), len(os.listdir("/proc/self/fd"))) == before
