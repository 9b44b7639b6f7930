"""A model of a drive that an installed package offers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spill.disks import io_threads
from tiered_mem.spill.chosen import chosen_tier, offered_drive
from tiered_mem.spill.filesystem import Files
from tiered_mem.spill.io_queue import IoQueue


class Slow:
    """Has no model of time but a clock that stands still."""

    def files(self, files: Files) -> Files:
        return files

    def queue(self, threads: IoQueue) -> IoQueue:
        threads.now = lambda: 0.0
        return threads


def test_a_managers_disk_tier_takes_the_drive_that_a_package_offers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, spill_dir = tmp_path / "packages", tmp_path / "spill"
    spill_dir.mkdir()
    for name, offer in {"nothing": "def drive(): return None", "slow": "drive = Slow"}.items():
        about = packages / f"{name}-0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        (about / "entry_points.txt").write_text(f"[tiered_mem.drives]\n{name} = offering_{name}:drive\n")
        (packages / f"offering_{name}.py").write_text(f"from tests.spill.test_offered_drive import Slow\n{offer}\n")
    assert offered_drive() is None
    monkeypatch.syspath_prepend(packages)
    assert isinstance(offered_drive(), Slow)
    tier = chosen_tier(str(spill_dir), "1MiB", None, None, None)
    assert tier is not None
    assert tier.now() == 0
    tier.close()
    assert io_threads() == []
