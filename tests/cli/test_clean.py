from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.cli.conftest import Command
from tests.spill.folders import HOME, leave_dead, nothing_new, tree, write
from tests.spill.light import process
from tiered_mem.spill.folder import SpillFolder


def told(command: Command, *arguments: object, status: int = 0) -> dict[str, Any]:
    """What `clean` says to programs."""
    done = command("clean", *arguments, "--json")
    assert (done.status, done.err) == (status, "")
    found: dict[str, Any] = json.loads(done.out)
    return found


def test_a_killed_process_leaves_what_clean_removes(command: Command, tmp_path: Path) -> None:
    code = f"""
    from tiered_mem.spill.disk_tier import DiskTier
    from tiered_mem.spill.filesystem import pages
    from tiered_mem.spill.lower_tier import Piece
    tier = DiskTier({str(tmp_path)!r}, capacity=1 << 20)
    with pages(8192) as ptr:
        tier.write([Piece("a", ptr, 8192, "uint8")], step=1, kind="test").job.wait()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert process(code).returncode < 0
    (folder,) = (tmp_path / HOME).iterdir()
    verified = command("inspect", tmp_path, "--verify")
    assert (verified.status, verified.out.count("right")) == (0, 1)
    done = command("clean", tmp_path)
    assert (done.status, done.err) == (0, "")
    assert [word in done.out for word in ("removed", str(folder), "12.0 KiB")] == [True] * 3
    assert tree(tmp_path) == set()


def test_live_processes_and_other_users_keep_their_files(command: Command, tmp_path: Path) -> None:
    (tmp_path / "tiered_mem-99999" / "dead-17-0000000000000000").mkdir(parents=True)
    (tmp_path / "results").write_text("precious")
    with closing(SpillFolder(tmp_path, run="live")) as folder:
        write(folder, "a", b"1")
        with nothing_new(tmp_path):
            nothing = command("clean", tmp_path)
        assert nothing == (0, f"no dead process has left files in {tmp_path}\n", "")
        (folder.path.with_name("dead-17-" + "0" * 16)).mkdir(mode=0o700)
        (folder.path.with_name("dead-17-" + "0" * 16) / "owner").write_text("")
        assert "dead-17-" in command("clean", tmp_path).out
        assert os.listdir(tmp_path / HOME) == [folder.path.name]
    assert tree(tmp_path) == {"results", "tiered_mem-99999", "tiered_mem-99999/dead-17-0000000000000000"}


def test_a_dry_run_says_what_it_would_do(command: Command, tmp_path: Path) -> None:
    path = leave_dead(tmp_path)
    with nothing_new(tmp_path):
        done = command("clean", tmp_path, "--dry-run")
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].strip() == "would be removed"
    (row,) = [line.replace("│", "").split() for line in lines if "dead-17-" in line]
    assert row == [str(path), "dead", "17", "1", "5", "B"]
    assert command("clean", tmp_path, "--dry-run") == done


def test_what_cannot_be_removed_is_told(command: Command, tmp_path: Path) -> None:
    (leave_dead(tmp_path) / "strange").mkdir()
    done = command("clean", tmp_path)
    (path,) = (tmp_path / HOME).iterdir()
    assert done.status == 1
    assert f"{path} stays, with 1 files of " in done.out


def test_programs_are_told_what_went_and_what_stays(command: Command, tmp_path: Path) -> None:
    path = leave_dead(tmp_path)
    dead = {"path": str(path), "run": "dead", "pid": 17, "alive": False, "files": 1, "bytes": 5}
    where = {"spill_dir": str(tmp_path), "spill_dirs": [str(tmp_path)]}
    about = {"schema": 1, **where, "dry_run": False, "removed": [], "left": []}
    with nothing_new(tmp_path):
        assert told(command, tmp_path, "--dry-run") == about | {"dry_run": True, "left": [dead]}
    assert told(command, tmp_path) == about | {"removed": [dead]}
    assert told(command, tmp_path) == about
    (leave_dead(tmp_path) / "strange").mkdir()
    found = told(command, tmp_path, status=1)
    assert (found["removed"], [each["path"] for each in found["left"]]) == ([], [f"{path}.going"])


def test_several_directories_are_cleaned_at_once(command: Command, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "other")]
    dead = []
    for path in paths:
        path.mkdir()
        dead.append(str(leave_dead(path)))
    found = told(command, *paths, "--dry-run")
    assert [each["path"] for each in found["left"]] == dead
    assert found["spill_dirs"] == [str(path) for path in paths]
    assert [each["path"] for each in told(command, *paths)["removed"]] == dead
    assert tree(tmp_path) == {"one", "other"}
    assert command("clean", *paths).out == f"no dead process has left files in {paths[0]}, {paths[1]}\n"
