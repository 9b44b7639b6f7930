from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest

from tests.spill.folders import HOME, leave_dead, tree, write
from tiered_mem.spill.folder import SpillFolder, sweep


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    with closing(SpillFolder(tmp_path, run="run")) as folder:
        for name in ("a", "b"):
            (folder.path / name).symlink_to(victim)
        with pytest.raises(FileExistsError):
            folder.create("a", os.O_TRUNC)
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
            folder.open("a", os.O_TRUNC)
        folder.remove("a")
    assert tree(tmp_path) == {"victim"}
    assert victim.read_text() == "precious"


def test_a_folder_that_is_put_in_its_place_is_not_touched(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path, run="run")
    write(folder, "a", b"mine")
    (tmp_path / HOME).rename(tmp_path / "moved")
    victim = tmp_path / "victim" / folder.path.name
    victim.mkdir(parents=True)
    (victim / "a").write_text("precious")
    (tmp_path / HOME).symlink_to("victim")
    fd = folder.open("a")
    assert os.pread(fd, 100, 0) == b"mine"
    os.close(fd)
    folder.close()
    assert (victim / "a").read_text() == "precious"
    assert tree(tmp_path / "moved") == set()


def test_a_dead_owners_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "a").write_text("precious")
    path = leave_dead(tmp_path)
    (path / "folder").symlink_to(tmp_path / "victim")
    (path / "file").symlink_to(tmp_path / "victim" / "a")
    sweep(tmp_path)
    assert tree(tmp_path) == {"victim", "victim/a"}


def test_a_link_in_place_of_the_owner_file_is_not_followed(tmp_path: Path) -> None:
    path = leave_dead(tmp_path)
    (path / "owner").rename(tmp_path / "victim")
    (path / "owner").symlink_to(tmp_path / "victim")
    assert sweep(tmp_path) == []
    assert tree(path) == {"a", "owner"}
