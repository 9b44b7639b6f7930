"""A dry run on a small machine: the host tier has the memory of the modelled server."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator.tests.launch import EMULATOR, ROOT, run

OFFER = '[project.entry-points."tiered_mem.hosts"]\nascend_emulator = "ascend_emulator.hosts:offered_host"\n'
DRY = ("--clock", "910b3", "--dry")


def offered(folder: Path, *options: str) -> str:
    """What the emulator tells of its host, without torch."""
    asked = "from ascend_emulator.hosts import offered_host; print(offered_host())"
    return run(*options, "-c", asked, cwd=folder).stdout.strip()


def test_a_dry_run_offers_the_servers_memory_and_others_none(tmp_path: Path) -> None:
    assert offered(tmp_path, *EMULATOR, *DRY) == str(512 << 30)
    assert offered(tmp_path, *EMULATOR, *DRY, "--host", "2TiB") == str(2 << 40)
    assert offered(tmp_path, *EMULATOR, "--clock", "910b3", "--host", "2TiB") == "None"
    assert offered(tmp_path) == "None"


@pytest.mark.slow(why="a process imports torch")
def test_a_manager_takes_more_than_this_machine_has(tmp_path: Path) -> None:
    """The offer is there however the emulator was installed."""
    assert OFFER in (ROOT / "emulator/pyproject.toml").read_text()
    about = tmp_path / "offered-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[tiered_mem.hosts]\nit = ascend_emulator.hosts:offered_host\n")
    (tmp_path / "take.py").write_text(
        "import sys\n"
        "from tiered_mem import TieringManager\n"
        "with TieringManager(policy='layer-order', device='npu', host_bytes=sys.argv[1]) as manager:\n"
        "    print(manager.stats()['host.capacity'])\n"
    )
    command = (*EMULATOR, *DRY, "--host", "900TiB", "take.py")
    assert run(*command, "800TiB", cwd=tmp_path, pythonpath=ROOT).stdout == f"{800 << 40}\n"
    refused = run(*command, "901TiB", cwd=tmp_path, pythonpath=ROOT).stderr
    assert "more than the memory of the machine that ascend_emulator models allows (900.0 TiB" in refused
