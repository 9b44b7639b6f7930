from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.spill.folders import HOME, nothing_new, tree, write
from tests.spill.light import process
from tiered_mem.errors import Closed
from tiered_mem.spill.folder import SpillFolder, owners, sweep


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SpillFolder]:
    with closing(SpillFolder(tmp_path, run="run")) as folder:
        yield folder


def test_files_are_made_opened_and_removed(folder: SpillFolder) -> None:
    write(folder, "a", b"content")
    fd = folder.open("a")
    assert os.pread(fd, 100, 0) == b"content"
    os.close(fd)
    assert (folder.path / "a").read_bytes() == b"content"
    folder.remove("a")
    assert os.listdir(folder.path) == ["owner"]


def test_only_this_user_may_see_anything(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with closing(SpillFolder(tmp_path, run="run")) as folder:
            write(folder, "a", b"")
            paths = (folder.path.parent, folder.path, folder.path / "owner", folder.path / "a")
            assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o700, 0o700, 0o600, 0o600]
    finally:
        os.umask(before)


def test_other_programs_that_are_started_get_none_of_the_files(folder: SpillFolder) -> None:
    made = folder.create("a")
    opened = folder.open("a")
    inherited = [os.get_inheritable(fd) for fd in (made, opened)]
    os.close(made)
    os.close(opened)
    assert inherited == [False, False]


def test_flags_are_added(folder: SpillFolder) -> None:
    write(folder, "a", b"")
    fd = folder.open("a", os.O_APPEND)
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND
    os.close(fd)


def test_a_file_is_made_once_and_opened_only_if_it_is_there(folder: SpillFolder) -> None:
    write(folder, "a", b"")
    with pytest.raises(FileExistsError):
        folder.create("a")
    for operation in (folder.open, folder.remove):
        with pytest.raises(FileNotFoundError):
            operation("b")


@pytest.mark.parametrize("name", ["", ".", "..", "owner", "a/b", "../a", "/tmp/a"])
def test_a_name_is_that_of_a_file_in_the_folder(folder: SpillFolder, name: str) -> None:
    for operation in (folder.create, folder.open, folder.remove):
        with pytest.raises(ValueError, match="no name for a spill file"):
            operation(name)


@pytest.mark.parametrize("run", ["", ".", "-a", "a/b", "a b", "ä", "a" * 101, "a\n"])
def test_a_run_is_named_by_plain_characters(tmp_path: Path, run: str) -> None:
    with pytest.raises(ValueError, match="run: up to 100 letters"):
        SpillFolder(tmp_path, run=run)
    assert tree(tmp_path) == set()


def test_the_owner_file_says_whose_the_folder_is(tmp_path: Path) -> None:
    with closing(SpillFolder(tmp_path, run="my-run.2")) as folder:
        said = json.loads((folder.path / "owner").read_text())
        assert (said["pid"], said["host"], said["run"]) == (os.getpid(), os.uname().nodename, "my-run.2")
        assert said["started"].endswith("+00:00")
        assert folder.path.parent == tmp_path / HOME
        assert folder.path.name.startswith(f"my-run.2-{os.getpid()}-")


def test_free_bytes_are_those_that_this_user_may_take(folder: SpillFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    said = os.statvfs_result((512, 4096, 1000, 500, 300, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "fstatvfs", lambda fd: said)
    assert folder.free_bytes() == 300 * 4096


def test_what_removes_old_files_from_tmp_finds_the_folder_locked(folder: SpillFolder) -> None:
    fd = os.open(folder.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


def test_a_folder_stays_where_it_is_as_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    with closing(SpillFolder("there", run="run")) as folder:
        monkeypatch.chdir("/")
        write(folder, "a", b"")
        assert (folder.path / "a").exists()
    assert tree(tmp_path) == {"there"}


# The end


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    with nothing_new(tmp_path):
        folder = SpillFolder(tmp_path, run="run")
        write(folder, "a", b"content")
        folder.close()
        folder.close()


def test_a_closed_folder_says_so(folder: SpillFolder) -> None:
    folder.close()
    for operation in (folder.create, folder.open, folder.remove):
        with pytest.raises(Closed, match=r"run-\d+-\w+ is closed"):
            operation("a")
    with pytest.raises(Closed):
        folder.free_bytes()


def test_nothing_is_left_of_a_folder_that_nobody_has_any_more(tmp_path: Path) -> None:
    with nothing_new(tmp_path):
        folder = SpillFolder(tmp_path, run="run")
        write(folder, "a", b"content")
        del folder


def test_nothing_is_left_of_a_process_that_ends_with_an_exception(tmp_path: Path) -> None:
    done = process(f"""
        folder = SpillFolder({str(tmp_path)!r}, run="run")
        os.close(folder.create("a"))
        raise RuntimeError("out of the blue")
        """)
    assert "out of the blue" in done.stderr
    assert tree(tmp_path) == set()


def test_a_folder_that_somebody_has_removed_can_be_closed(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path, run="run")
    shutil.rmtree(tmp_path / HOME)
    with pytest.raises(FileNotFoundError):
        folder.create("a")
    folder.close()
    assert tree(tmp_path) == set()


def test_what_cannot_be_removed_is_told_and_left_to_the_next_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = SpillFolder(tmp_path, run="run")
    write(folder, "a", b"")
    write(folder, "b", b"")
    unlink = os.unlink

    def fail_for_a(name: str, *, dir_fd: int) -> None:
        if name == "a":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(name, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail_for_a)
        folder.close()
    assert "stays, with 1 files: a (Input/output error)" in caplog.text
    (found,) = owners(tmp_path)
    assert (found.alive, found.files) == (False, 1)
    assert len(sweep(tmp_path)) == 1
    assert tree(tmp_path) == set()
