from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.spill.folders import leave_dead, nothing_new, tree
from tests.spill.without_torch import ROOT
from tiered_mem.spill.filesystem import filesystem_of
from tiered_mem.spill.record_io import checksum_by_name

SHM = Path("/dev/shm")
NO_LINK = ("--device", "cpu")


def test_a_drive_is_measured_and_nothing_stays(command: Command, tmp_path: Path) -> None:
    with nothing_new(tmp_path):
        done = command("probe", tmp_path, *NO_LINK, "--bytes", "40MiB", "--json")
    assert done.status == 0
    found = json.loads(done.out)
    assert found["link"] == {"problem": "it was not asked for"}
    drive = found["drive"]
    assert (found["drives"], found["together"]) == ([drive], None)
    assert (drive["path"], drive["filesystem"]) == (str(tmp_path), filesystem_of(tmp_path).name)
    assert drive["bytes"] == 40 << 20
    assert drive["write_gb_per_s"] == drive["write"]
    assert drive["latency_seconds"] == drive["latency"]
    assert drive["checksum"] == checksum_by_name(None).name
    assert drive["free_bytes"] > 40 << 20
    assert min(drive[name] for name in ("write", "read", "both", "checksum_speed")) > 0
    assert {"in_memory", "network", "direct_io", "alignment"} < set(drive)


def test_host_memory_is_what_auto_goes_by(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERED_MEM_HOST_LIMIT", "64GiB")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    small = (*NO_LINK, "--bytes", "10KB")
    found = json.loads(command("probe", tmp_path, *small, "--json").out)["host"]
    assert found == {
        "limit_bytes": 64 << 30,
        "limited_by": "TIERED_MEM_HOST_LIMIT=64GiB in the environment",
        "processes": 4,
        "auto_bytes": 8 << 30,
    }
    table = command("probe", tmp_path, *small).out
    assert "64.0 GiB for 4 processes together (LOCAL_WORLD_SIZE): TIERED_MEM_HOST_LIMIT=64GiB" in table


def test_a_table_says_the_same(command: Command, tmp_path: Path) -> None:
    done = command("probe", tmp_path, *NO_LINK, "--bytes", "10KB")
    names = [line.split("│")[1].strip() for line in done.out.splitlines() if line.startswith("│")]
    assert names[2:] == ["file system", "left", "direct I/O", "write", "read", "both at once", "checksum"]
    assert "The link to a device was not measured: it was not asked for." in done.out


def test_several_drives_are_measured_together_and_alone(command: Command, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "other")]
    for path in paths:
        path.mkdir()
    small = (*paths, *NO_LINK, "--bytes", "10KB")
    with nothing_new(tmp_path):
        found = json.loads(command("probe", *small, "--json").out)
        shown = command("probe", *small).out
    assert [drive["path"] for drive in found["drives"]] == [str(path) for path in paths]
    assert found["drive"] == found["drives"][0]
    assert min(found["together"][f"{way}_gb_per_s"] for way in ("write", "read", "both")) > 0
    names = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")]
    assert names[-3:] == [*map(str, paths), "together"]
    assert names.count("file system") == 2


def test_a_directory_that_is_named_twice_is_refused(command: Command, tmp_path: Path) -> None:
    done = command("probe", tmp_path, tmp_path, *NO_LINK, "--bytes", "10KB")
    assert (done.status, done.out) == (2, "")
    assert "are one directory; name one on each drive" in done.err


def test_without_a_directory_it_is_the_temporary_files(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with nothing_new(tmp_path):
        done = command("probe", *NO_LINK, "--bytes", "10KB", "--json")
    assert json.loads(done.out)["drive"]["path"] == str(tmp_path)


@pytest.mark.skipif(not SHM.is_mount(), reason="there is no /dev/shm")
def test_memory_is_told_from_a_drive(command: Command) -> None:
    done = command("probe", SHM, *NO_LINK, "--bytes", "10KB")
    assert done.status == 0
    assert "tmpfs, in memory" in done.out


def test_more_than_the_drive_has_left_is_refused(command: Command, tmp_path: Path) -> None:
    with nothing_new(tmp_path):
        done = command("probe", tmp_path, *NO_LINK, "--bytes", "900TiB")
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("tiered-mem: to write 900.0 TiB takes ")
    assert done.err.endswith("left; lower --bytes, or make room\n")


@pytest.mark.skipif(not Path("/proc").is_mount(), reason="there is no /proc")
def test_what_holds_no_files_is_refused(command: Command) -> None:
    done = command("probe", "/proc", *NO_LINK)
    assert (done.status, done.out) == (2, "")
    assert done.err == (
        "tiered-mem: /proc lies on proc, which has no room for files; give a directory on a local drive\n"
    )


def test_low_speeds_are_not_rounded_to_nothing(command: Command, tmp_path: Path) -> None:
    done = command("probe", tmp_path, *NO_LINK, "--bytes", "10")
    assert (done.status, done.out.count("B/s")) == (0, 4)
    assert " 0.00 " not in done.out


def test_what_the_dead_have_left_goes_first(command: Command, tmp_path: Path) -> None:
    """As with every process that spills there."""
    leave_dead(tmp_path)
    assert command("probe", tmp_path, *NO_LINK, "--bytes", "10KB").status == 0
    assert tree(tmp_path) == set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_stays_of_a_probe_that_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tiered_mem", "probe", str(tmp_path), *NO_LINK, "--bytes", "2GiB"]
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as probe:
        while not has_records(tmp_path):
            assert probe.poll() is None
        probe.send_signal(number)
        _, err = probe.communicate()
    # 0 is for one that was through before it heard of the signal.
    assert probe.returncode in (0, 128 + number)
    assert err == ""
    assert tree(tmp_path) == set()


def has_records(path: Path) -> bool:
    time.sleep(0.01)
    return any(path.glob("*/*/*.safetensors"))
