"""The published offloads beside the modelled ones."""

import json
import subprocess
import sys
from dataclasses import dataclass

from benchmarks.published.study import ROOT


@dataclass(frozen=True)
class Figures:
    """Of a step: milliseconds plain and offloaded, and the GB that offloading saves of the peak."""

    plain: float
    offloaded: float
    saved: float

    @property
    def slowdown(self) -> float:
        return self.offloaded / self.plain - 1


@dataclass(frozen=True)
class Published:
    name: str
    case: str
    source: str
    chip: str
    figures: Figures


# The second one's throughput is 44.2 and 29.2 samples a second, and its steps have 256. Neither thread names the
# chip; the first one's is assumed, and the second one's follows from that throughput.
PUBLISHED = [
    Published(
        "Megatron, inputs of query, key and value",
        "megatron",
        "https://github.com/NVIDIA/Megatron-LM/pull/1752, August 2025",
        "h100",
        Figures(1249.7, 1253.8, 1.4378),
    ),
    Published(
        "PyTorch, all activations of pipeline stages",
        "pipeline",
        "https://github.com/pytorch/pytorch/pull/174436, February 2026",
        "h100",
        Figures(256e3 / 44.2, 256e3 / 29.2, 45.62 - 17.22),
    ),
]


def modelled(published: Published) -> Figures:
    """Raises RuntimeError with what a failing step printed."""
    plain, offloaded = (_run(published, way) for way in ("plain", "offloaded"))
    return Figures(
        plain["milliseconds"] + plain["bubble"],
        offloaded["milliseconds"] + offloaded["bubble"],
        plain["gigabytes"] - offloaded["gigabytes"],
    )


def _run(published: Published, way: str) -> dict[str, float]:
    launcher = [sys.executable, "-m", "ascend_emulator", "--clock", published.chip, "--dry", "--hbm", "80GiB"]
    done = subprocess.run(
        [*launcher, "-m", "benchmarks.published.offload", published.case, way],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{published.name}: {done.stderr[-4000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures
