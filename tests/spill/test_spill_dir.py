from __future__ import annotations

import errno
import fcntl
import os
from contextlib import closing
from pathlib import Path

import pytest

from tests.spill.folders import HOME, leave_dead, needs_root, nothing_new, tree, write
from tests.spill.light import NOBODY, common_dir, output_of, process
from tiered_mem.errors import SpillDirRefused
from tiered_mem.spill import filesystem
from tiered_mem.spill.filesystem import filesystem_of
from tiered_mem.spill.folder import SpillFolder, owners, sweep

SHM = Path("/dev/shm")


def test_a_spill_dir_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(SpillDirRefused, match="missing does not exist; make it first"):
        SpillFolder(tmp_path / "missing", run="run")
    with pytest.raises(SpillDirRefused, match="spill_dir is empty"):
        SpillFolder("", run="run")


def test_a_spill_dir_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    with pytest.raises(SpillDirRefused, match="file is not a directory"):
        SpillFolder(tmp_path / "file", run="run")


@pytest.mark.parametrize("end", ["", "/", "/."])
def test_a_spill_dir_is_no_link(tmp_path: Path, end: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    with (
        nothing_new(tmp_path),
        pytest.raises(SpillDirRefused, match=rf"symbolic link.* give {tmp_path}/there itself"),
    ):
        SpillFolder(f"{tmp_path}/link{end}", run="run")


@pytest.mark.parametrize("mode", [0o777, 0o703])
def test_a_spill_dir_in_which_anybody_may_remove_anything_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with nothing_new(tmp_path), pytest.raises(SpillDirRefused, match=rf"mode {mode:04o}.*chmod \+t"):
        SpillFolder(tmp_path, run="run")


def test_a_spill_dir_in_which_all_may_remove_their_own_is_taken(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    SpillFolder(tmp_path, run="run").close()


def test_a_spill_dir_must_be_writable() -> None:
    with common_dir() as spill_dir:
        spill_dir.chmod(0o555)
        done = process(f"SpillFolder({str(spill_dir)!r}, run='run')", unprivileged=True)
        assert f"SpillDirRefused: no folder can be made in {spill_dir}: Permission denied" in done.stderr
        assert tree(spill_dir) == set()
        spill_dir.chmod(0o755)


def test_a_spill_dir_that_may_not_be_listed_will_do() -> None:
    with common_dir() as spill_dir:
        spill_dir.chmod(0o1333)
        output_of(
            f"""
            folder = SpillFolder({str(spill_dir)!r}, run="run")
            os.close(folder.create("a"))
            folder.close()
            """,
            unprivileged=True,
        )
        spill_dir.chmod(0o755)
        assert tree(spill_dir) == set()


def test_a_link_in_place_of_the_users_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir(mode=0o700)
    (tmp_path / HOME).symlink_to("victim")
    with nothing_new(tmp_path), pytest.raises(SpillDirRefused, match=rf"{HOME} is a link or a file"):
        SpillFolder(tmp_path, run="run")


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_users_folder_that_is_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / HOME).mkdir()
    (tmp_path / HOME).chmod(mode)
    with (
        nothing_new(tmp_path),
        pytest.raises(SpillDirRefused, match=rf"{HOME} is open to others \(mode {mode:04o}"),
    ):
        SpillFolder(tmp_path, run="run")


@needs_root
def test_a_folder_that_another_user_has_put_there_is_refused() -> None:
    with common_dir() as spill_dir:
        spill_dir.chmod(0o1777)
        output_of(f"os.mkdir({str(spill_dir / HOME)!r}, 0o700)", unprivileged=True)
        with pytest.raises(SpillDirRefused, match=rf"{HOME} belongs to user {NOBODY}, not to 0"):
            SpillFolder(spill_dir, run="run")
        (spill_dir / f"tiered_mem-{NOBODY}").mkdir(mode=0o700)
        done = process(f"SpillFolder({str(spill_dir)!r}, run='run')", unprivileged=True)
        assert f"tiered_mem-{NOBODY} belongs to user 0, not to {NOBODY}" in done.stderr


@pytest.mark.parametrize(("call", "code"), [("flock", errno.ENOLCK), ("write", errno.ENOSPC)])
def test_nothing_is_left_where_a_folder_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    module = fcntl if call == "flock" else os
    with nothing_new(tmp_path), monkeypatch.context() as patch:
        patch.setattr(module, call, fail)
        with pytest.raises(SpillDirRefused, match=os.strerror(code)):
            SpillFolder(tmp_path, run="run")


# File systems


@pytest.mark.skipif(not SHM.is_mount(), reason="there is no /dev/shm")
def test_a_spill_dir_in_memory_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with closing(SpillFolder(SHM, run="run")) as folder:
        write(folder, "a", b"")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"{folder.path} lies on tmpfs, which is memory"
    ]


@pytest.fixture
def on_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the file system of tmp_path for one that other machines use too."""
    monkeypatch.setattr(filesystem, "_NETWORK", {filesystem_of(tmp_path).name})


@pytest.mark.usefixtures("on_a_network")
def test_another_machines_folder_on_a_network_file_system_stays(tmp_path: Path) -> None:
    """Its locks need not reach this machine."""
    leave_dead(tmp_path, host="another")
    assert sweep(tmp_path) == []
    assert [each.alive for each in owners(tmp_path)] == [True]


@pytest.mark.usefixtures("on_a_network")
def test_this_machines_folder_on_a_network_file_system_goes(tmp_path: Path) -> None:
    leave_dead(tmp_path)
    assert len(sweep(tmp_path)) == 1


@pytest.mark.usefixtures("on_a_network")
def test_a_folder_of_nobody_knows_which_machine_stays_on_a_network_file_system(tmp_path: Path) -> None:
    (leave_dead(tmp_path) / "owner").write_text("")
    assert sweep(tmp_path) == []


@pytest.mark.usefixtures("on_a_network")
def test_a_network_file_system_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SpillFolder(tmp_path, run="run").close()
    assert "which is no local file system" in caplog.text
    assert "which is memory" not in caplog.text
