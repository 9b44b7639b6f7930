from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
from contextlib import closing
from pathlib import Path

import pytest

from tests.spill.folders import HOME, leave_dead, needs_root, nothing_new, tree, write
from tests.spill.light import NOBODY, common_dir, output_of
from tiered_mem.errors import SpillDirRefused
from tiered_mem.spill import home
from tiered_mem.spill.folder import Owned, SpillFolder, owners, sweep


def test_two_live_owners_lie_side_by_side(tmp_path: Path) -> None:
    with closing(SpillFolder(tmp_path, run="one")) as one, closing(SpillFolder(tmp_path, run="one")) as two:
        write(one, "a", b"1")
        write(two, "a", b"2")
        assert sweep(tmp_path) == []
        assert output_of(f"print(sweep({str(tmp_path)!r}))") == "[]\n"
        assert [(folder.path / "a").read_bytes() for folder in (one, two)] == [b"1", b"2"]
        two.close()
        assert os.listdir(one.path.parent) == [one.path.name]


def test_a_dead_owners_folder_goes_as_the_next_process_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = leave_dead(tmp_path)
    with caplog.at_level(logging.INFO, "tiered_mem.spill"), closing(SpillFolder(tmp_path, run="next")) as folder:
        assert os.listdir(tmp_path / HOME) == [folder.path.name]
    assert f"swept {path}: process 17 is dead, and left 1 files of 5 B" in caplog.text


def test_owners_and_sweep_tell_what_they_find(tmp_path: Path) -> None:
    with closing(SpillFolder(tmp_path, run="live-1")) as folder:
        for name in ("a", "b"):
            write(folder, name, b"123")
        # Beside the live one: making another would sweep it.
        path = folder.path.with_name("dead-17-" + "0" * 16)
        shutil.copytree(folder.path, path)
        live = Owned(folder.path, "live-1", os.getpid(), alive=True, nbytes=6, files=2)
        dead = Owned(path, "dead", 17, alive=False, nbytes=6, files=2)
        assert owners(tmp_path) == [dead, live]
        assert sweep(tmp_path) == [dead]
        assert owners(tmp_path) == [live]


def test_a_look_leaves_all_as_it_is(tmp_path: Path) -> None:
    leave_dead(tmp_path)
    (tmp_path / HOME / f"dead-18-{0:016}").mkdir()
    with nothing_new(tmp_path):
        owners(tmp_path)


def test_a_spill_dir_that_nobody_has_used_has_no_owners(tmp_path: Path) -> None:
    assert owners(tmp_path) == sweep(tmp_path) == []
    assert tree(tmp_path) == set()
    for look in (owners, sweep):
        with pytest.raises(SpillDirRefused, match="does not exist"):
            look(tmp_path / "missing")


def test_a_neighbours_files_stay(tmp_path: Path) -> None:
    for name in ("results", "tiered_mem-99999/dead-17-0000000000000000", "victim"):
        (tmp_path / name).mkdir(parents=True)
        for file in ("owner", "a"):
            (tmp_path / name / file).write_text("precious")
    home = tmp_path / HOME
    home.mkdir(mode=0o700)
    (home / "notes").write_text("precious")
    (home / "dead-17-0000000000000000-old").mkdir(mode=0o700)
    (home / "dead-17-0000000000000001").write_text("precious")
    (home / "dead-17-0000000000000002").symlink_to(tmp_path / "victim")
    (home / "dead-17-0000000000000003").mkdir(mode=0o700)
    (home / "dead-17-0000000000000003" / "no owner").write_text("precious")
    with nothing_new(tmp_path):
        SpillFolder(tmp_path, run="run").close()
        assert sweep(tmp_path) == []


@pytest.mark.parametrize("kind", ["folder", pytest.param("another user's", marks=needs_root)])
def test_what_others_have_put_into_a_dead_owners_folder_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    path = leave_dead(tmp_path)
    strange = path / "strange"
    if kind == "folder":
        strange.mkdir()
    else:
        strange.write_text("precious")
        os.chown(strange, NOBODY, NOBODY)
    assert sweep(tmp_path) == []
    (left,) = owners(tmp_path)
    assert tree(left.path) == {"owner", "strange"}
    assert f"{left.path} stays, with 1 files: strange" in caplog.text
    (left.path / "strange").rename(tmp_path / "taken away")
    assert len(sweep(tmp_path)) == 1
    assert tree(tmp_path) == {"taken away"}


@needs_root
def test_users_share_a_spill_dir() -> None:
    with common_dir() as spill_dir:
        spill_dir.chmod(0o1777)
        path = leave_dead(spill_dir)
        found = output_of(
            f"""
            folder = SpillFolder({str(spill_dir)!r}, run="theirs")
            print([each.run for each in owners({str(spill_dir)!r})], sweep({str(spill_dir)!r}))
            folder.close()
            """,
            unprivileged=True,
        )
        assert found == "['theirs'] []\n"
        assert [each.path for each in owners(spill_dir)] == [path]


@pytest.mark.parametrize("text", ["", "[]", "{}", "\0\0\0"])
def test_a_damaged_owner_file_does_not_keep_a_dead_owners_folder(tmp_path: Path, text: str) -> None:
    (leave_dead(tmp_path) / "owner").write_text(text)
    assert [(each.run, each.pid) for each in sweep(tmp_path)] == [("dead", 17)]


# What others are removing just now


def start_in_a_thread(spill_dir: Path) -> threading.Thread:
    thread = threading.Thread(target=lambda: SpillFolder(spill_dir, run="next").close())
    thread.start()
    return thread


def test_a_start_waits_for_the_room_that_others_are_making(tmp_path: Path) -> None:
    path = leave_dead(tmp_path, going=True)
    with (path / "owner").open() as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        assert [each.alive for each in owners(tmp_path)] == [False]
        thread = start_in_a_thread(tmp_path)
        thread.join(0.3)
        waits = thread.is_alive()
    thread.join()
    assert waits
    assert tree(tmp_path) == set()


def test_a_start_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "_PATIENCE_S", 0.05)
    path = leave_dead(tmp_path, going=True)
    with (path / "owner").open() as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        start_in_a_thread(tmp_path).join()
        assert tree(path) == {"owner", "a"}
