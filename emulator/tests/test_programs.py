"""Programs as people write them, which know of no emulator: each runs unmodified, or is refused and told why."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator.tests.hccl_jobs import HBM
from emulator.tests.launch import EMULATOR, run, run_ranks

pytestmark = [
    pytest.mark.once(why="its processes have a schedule of their own"),
    pytest.mark.slow(why="each program imports torch, and some import libraries"),
]

PROGRAMS = Path(__file__).parent / "programs"
# With the packages that they need beside torch and torch_npu.
ALONE: dict[str, tuple[str, ...]] = {
    "lstm": (),
    "transfer": (),
    "accelerated": ("accelerate",),
    "diffusion": ("diffusers",),
    "lora": ("peft", "transformers"),
    "trainer": ("accelerate", "transformers"),
}
OF_RANKS = ("fsdp1", "sync_batch_norm")


@pytest.mark.parametrize("name", ALONE)
def test_a_program_runs_unmodified(name: str, tmp_path: Path) -> None:
    for package in ALONE[name]:
        pytest.importorskip(package, reason=f"the program needs {package}: make test-integrations installs all")
    done = run(*EMULATOR, str(PROGRAMS / f"{name}.py"), str(tmp_path / "out"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", OF_RANKS)
def test_a_program_of_two_ranks_runs_unmodified(name: str, tmp_path: Path) -> None:
    done = run_ranks(2, HBM, str(PROGRAMS / f"{name}.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_channels_last_is_refused_by_torch_npu_with_its_reason(tmp_path: Path) -> None:
    done = run(*EMULATOR, str(PROGRAMS / "channels_last.py"), cwd=tmp_path)
    assert done.stdout == "refused: RuntimeError Only contiguous_format or preserve_format is supported.\n", (
        done.stderr
    )
