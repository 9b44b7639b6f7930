from __future__ import annotations

import json
import os
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.launch import run
from tests.cli.conftest import Command
from tests.cli.owners import SAMPLE, change, either, owner, put
from tests.spill.folders import HOME, leave_dead, needs_root, nothing_new
from tests.spill.light import NOBODY, common_dir
from tests.spill.records import sample
from tests.spill.without_torch import ROOT
from tiered_mem.allocators import PageableMemory, SlabPool
from tiered_mem.spill.disk_tier import DiskTier
from tiered_mem.spill.lower_tier import Piece

HEADER = SAMPLE.layout.header_bytes


def looked(command: Command, spill_dir: Path, *options: str, status: int = 0) -> dict[str, Any]:
    """What is found, as JSON, by a command that leaves all as it is and says nothing else."""
    with nothing_new(spill_dir):
        done = command("inspect", spill_dir, "--json", *options)
    assert (done.status, done.err) == (status, "")
    found: dict[str, Any] = json.loads(done.out)
    return found


def records(command: Command, spill_dir: Path, *options: str, status: int = 0) -> list[dict[str, Any]]:
    """Those of the only owner."""
    (one,) = looked(command, spill_dir, *options, status=status)["owners"]
    found: list[dict[str, Any]] = one["records"]
    return found


def test_the_records_of_a_disk_tier_are_listed(command: Command, tmp_path: Path) -> None:
    with closing(DiskTier(tmp_path, capacity=1 << 20)) as tier, SlabPool(PageableMemory()) as pool:
        region = pool.allocate(8192)
        pieces = [Piece("one", region.ptr, 4096, "float32"), Piece("two", region.ptr + 4096, 100, "int8")]
        written = [tier.write(pieces[:count], step=7, kind="activation") for count in (1, 2)]
        for record in written:
            record.job.wait()
            assert record.job.error is None
        (found,) = looked(command, tmp_path, "--verify")["owners"]
        pool.deallocate(region)
    path = Path(found["path"])
    assert (path.parent, path.name.split("-")[0]) == (tmp_path / HOME, found["run"])
    assert (found["pid"], found["alive"], found["files"]) == (os.getpid(), True, 2)
    assert found["bytes"] == sum(record.nbytes for record in written)
    assert sorted(found["records"], key=lambda record: record["number"]) == [
        {
            "file": next(each["file"] for each in found["records"] if each["number"] == record.number),
            "state": "right",
            "bytes": record.nbytes,
            "run": found["run"],
            "number": record.number,
            "kind": "activation",
            "step": 7,
            "entries": entries,
            "write": record.number,
            "checksum": record.header.algorithm,
        }
        for entries, record in enumerate(written, start=1)
    ]
    assert looked(command, tmp_path) == {"schema": 1, "spill_dir": str(tmp_path), "owners": [], "others": []}


def test_tables_show_owners_and_records(command: Command, tmp_path: Path) -> None:
    put(leave_dead(tmp_path))
    done = command("inspect", tmp_path)
    words = [line.strip("│ ").replace("│", "").split() for line in done.out.splitlines()]
    folder = "dead-17-" + "0" * 16
    nbytes = len(SAMPLE.data) + 5
    assert [folder, "dead", "17", "dead", "2", f"{nbytes / 1024:.1f}", "KiB"] in words
    size = [f"{len(SAMPLE.data) / 1024:.1f}", "KiB"]
    assert ["000000.safetensors", "3", "activation", "11", "2", *size, "5", "whole"] in words
    assert (done.status, done.err) == (0, "")


def test_an_empty_directory_has_nothing_to_show(command: Command, tmp_path: Path) -> None:
    assert command("inspect", tmp_path) == (0, f"no process of this user's has files in {tmp_path}\n", "")


@either
def test_a_right_record_is_right(command: Command, tmp_path: Path, alive: bool) -> None:
    with owner(tmp_path, alive=alive) as folder:
        put(folder)
        assert [found["state"] for found in records(command, tmp_path)] == ["whole"]
        assert [found["state"] for found in records(command, tmp_path, "--verify")] == ["right"]


@either
def test_a_flipped_bit_in_the_data_is_wrong(command: Command, tmp_path: Path, alive: bool) -> None:
    """Of a live process too, as long as its header is the same before and after."""
    with owner(tmp_path, alive=alive) as folder:
        change(put(folder), HEADER + 9_999)
        assert [found["state"] for found in records(command, tmp_path)] == ["whole"]
        (found,) = records(command, tmp_path, "--verify", status=1)
    assert found["state"] == "wrong"
    assert found["problem"].startswith("crc32 of 'block.17': expected ")


def test_one_wrong_record_of_many_is_enough(command: Command, tmp_path: Path) -> None:
    with owner(tmp_path, alive=False) as folder:
        paths = [put(folder, name=f"{number:06d}.safetensors") for number in range(3)]
        change(paths[1], HEADER)
        states = [found["state"] for found in records(command, tmp_path, "--verify", status=1)]
        assert states == ["right", "wrong", "right"]
        assert command("inspect", tmp_path, "--verify").status == 1


@pytest.mark.parametrize("content", [bytes(HEADER), None], ids=["no header", "empty"])
@either
def test_a_write_that_is_not_at_its_end_is_not_wrong(
    command: Command, tmp_path: Path, alive: bool, content: bytes | None
) -> None:
    with owner(tmp_path, alive=alive) as folder:
        path = put(folder)
        if content is None:
            os.truncate(path, 0)
        else:
            change(path, 0, content)
        (found,) = records(command, tmp_path, "--verify")
        done = command("inspect", tmp_path)
    assert found["state"] == ("changing" if alive else "unfinished")
    meaning = "its process is alive, and may have been writing it" if alive else "its process ended before it was"
    assert f"{found['state']}: {meaning}" in done.out


@either
def test_a_damaged_header_is_wrong_unless_its_process_is_alive(
    command: Command, tmp_path: Path, alive: bool
) -> None:
    with owner(tmp_path, alive=alive) as folder:
        change(put(folder), 100)
        (found,) = records(command, tmp_path, "--verify", status=0 if alive else 1)
    assert found["state"] == ("changing" if alive else "wrong")
    assert found["problem"].startswith("checksum of the header: ")
    assert "number" not in found


def test_a_record_that_is_written_over_meanwhile_is_not_wrong(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header is there when it is looked at; then another record's data; then that record's header."""
    with owner(tmp_path, alive=True) as folder:
        path = put(folder)
        change(path, HEADER)
        opened = 0

        def os_open(name: Any, *arguments: Any, original: Any = os.open, **more: Any) -> int:
            nonlocal opened
            if name == str(path):
                opened += 1
                if opened == 3:
                    put(folder, sample(("block.19", "float32", 14_096), write=6))
            return int(original(name, *arguments, **more))

        monkeypatch.setattr(os, "open", os_open)
        (found,) = records(command, tmp_path, "--verify")
        monkeypatch.undo()
    assert opened == 3
    assert found["state"] == "changing"
    assert found["problem"].startswith("crc32 of 'block.17': expected ")


def test_a_record_without_checksums_cannot_be_verified(command: Command, tmp_path: Path) -> None:
    with owner(tmp_path, alive=False) as folder:
        change(put(folder, sample(("a", "uint8", 100), algorithm="none")), HEADER)
        (found,) = records(command, tmp_path, "--verify")
    assert (found["state"], found["problem"]) == ("whole", "it has no checksums")


def test_what_is_no_file_is_neither_followed_nor_waited_for(command: Command, tmp_path: Path) -> None:
    with owner(tmp_path, alive=False) as folder:
        os.mkfifo(folder / "0")
        (folder / "1").symlink_to(put(tmp_path))
        (folder / "2").mkdir()
        found = records(command, tmp_path, "--verify", status=1)
    assert [each["state"] for each in found] == ["wrong"] * 3
    assert f"found {stat.filemode(stat.S_IFIFO | 0o644)[0]}" in found[0]["problem"]
    assert found[1]["problem"] == "Too many levels of symbolic links"


def test_names_are_shown_as_they_are_but_for_control_characters(command: Command, tmp_path: Path) -> None:
    with owner(tmp_path, alive=False) as folder:
        put(folder, name="[red]\x1b[31m\udcff")
        done = command("inspect", tmp_path)
    assert "[red]?[31m?" in done.out
    assert "\x1b" not in done.out


def test_another_users_folder_is_told_of(command: Command, tmp_path: Path) -> None:
    (tmp_path / "tiered_mem-99999").mkdir(mode=0o700)
    (tmp_path / "tiered_mem-mine").mkdir()
    leave_dead(tmp_path)
    path = tmp_path / "tiered_mem-99999"
    assert looked(command, tmp_path)["others"] == [{"path": str(path), "user": "99999"}]
    done = command("inspect", tmp_path)
    assert f"{path} is for user 99999 alone to look into: run this as that user\n" in done.out


AS_NOBODY = """
import os, sys
from pathlib import Path
import rich.console, rich.progress, rich.table  # which lie where that user may not look
from tiered_mem.cli import main

path = Path(sys.argv[1])
os.setgroups([])
os.setgid({0})
os.setuid({0})
print(main(["inspect", str(path)]), flush=True)
print(main(["inspect", str(path / "tiered_mem-0")]), flush=True)
print(main(["clean", str(path / "closed")]), flush=True)
"""


@needs_root
def test_what_may_not_be_read_is_said_in_words() -> None:
    with common_dir() as spill_dir:
        leave_dead(spill_dir)
        (spill_dir / "closed").mkdir(mode=0o700)
        script = AS_NOBODY.format(NOBODY)
        done = run("-c", script, str(spill_dir), cwd=ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.splitlines() == [
        f"no process of this user's has files in {spill_dir}",
        f"{spill_dir}/tiered_mem-0 is for user 0 (root) alone to look into: run this as that user",
        "0",
        "2",
        "2",
    ]
    above, closed = done.stderr.splitlines()
    assert above == (
        f"tiered-mem: {spill_dir}/tiered_mem-0 holds the spill files of user 0 (root); "
        f"give the directory above it, {spill_dir}"
    )
    assert closed.startswith(f"tiered-mem: {spill_dir}/closed may not be entered by user {NOBODY}")
