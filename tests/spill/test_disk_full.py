"""Real file systems without room."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spill.disks import BLOCK, MIB, disk_in
from tests.spill.memory import noise
from tiered_mem.errors import TierFull


@pytest.fixture(params=["tmpfs", "ext4"])
def small_file_system(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """24 MiB. Needs the right to mount."""
    where = tmp_path / "mounted"
    where.mkdir()
    if request.param == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "tmpfs", str(where)]
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(24 * MIB)
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("mkfs.ext4 is not installed")
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        mount = ["mount", "-o", "loop", str(image), str(where)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"{request.param} cannot be mounted here: {done.stderr.strip()}")
    try:
        (where / "spill").mkdir()
        yield where / "spill"
    finally:
        subprocess.run(["umount", str(where)], check=True)


def fill(folder: Path, *, but: int) -> Path:
    """A file of somebody else that leaves so many bytes of the file system."""
    path = folder.parent / "somebody's"
    with path.open("wb") as file:
        found = os.statvfs(folder)
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - but)
    return path


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def test_a_full_file_system_costs_nothing_but_time(small_file_system: Path) -> None:
    with disk_in(small_file_system, capacity=16 * MIB) as disk:
        good = disk.put(noise(4 * MIB))
        others = fill(small_file_system, but=3 * MIB)
        free = free_bytes(small_file_system)
        error = disk.refused(noise(8 * MIB))
        assert isinstance(error, TierFull)
        assert "No space left on device" in str(error)
        assert (error.needed, error.limit) == (8 * MIB + BLOCK, 16 * MIB)
        assert abs(free_bytes(small_file_system) - free) <= 16 * BLOCK, "what the failed one took is given back"
        assert disk.tier.stats().reserved == disk.real_bytes() == good.nbytes
        assert disk.tier.stats().state == "failing"
        assert disk.get(good) == [noise(4 * MIB)]
        others.unlink()
        disk.clock.now += 1
        second = disk.put(noise(8 * MIB, 1))
        assert disk.tier.stats().state == "ok"
        assert disk.get(second) == [noise(8 * MIB, 1)]
        assert disk.get(good) == [noise(4 * MIB)]


def test_files_that_nobody_needs_make_room_on_a_full_file_system(small_file_system: Path) -> None:
    with disk_in(small_file_system, capacity=16 * MIB) as disk:
        records = [disk.put(noise(2 * MIB, seed)) for seed in range(3)]
        others = fill(small_file_system, but=MIB)
        for record in records:
            disk.tier.release(record)
        large = disk.put(noise(5 * MIB))
        assert disk.get(large) == [noise(5 * MIB)]
        assert disk.tier.stats().files == 1
        assert disk.tier.stats().reserved == disk.real_bytes() == large.nbytes
        others.unlink()
