"""Runs rows, those of a chip in a process of their own, and sets what was modelled beside what was published."""

import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ascend_emulator import machines

from benchmarks.published.rows import Row

# Children import this package from there.
ROOT = Path(__file__).parents[2]
# A row's model lies whole on one card here, also where many cards had a share each.
_DEVICE_MEMORY = "2TiB"


@dataclass(frozen=True)
class Result:
    """A row, and what the clock says of it with the chip file's factor. Times in milliseconds."""

    row: Row
    modelled: float


@dataclass(frozen=True)
class Comparison:
    """A row beside its model. Errors are modelled over published throughput, minus 1: above 0 is too fast.

    uncalibrated: with a factor of 1; calibrated: with the one that fits the chip's other rows.
    """

    row: Row
    modelled: float
    uncalibrated: float
    calibrated: float


def run(rows: Iterable[Row]) -> Iterator[Result]:
    """Raises RuntimeError with what a failing row printed."""
    for (chip, attention, _), group in groupby(rows, key=lambda row: (row.chip, row.attention, row.host_bound)):
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(_chip_file(chip, attention))
            file.flush()
            yield from _run(file.name, list(group))


def _chip_file(chip: str, attention: float) -> str:
    """The chip's file, with another kernel for attention."""
    text = (Path(machines.__file__).parent / "chips" / f"{chip}.toml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("attention_shares"))
    rows = [row.split(":") for row in _figure(chip, "matrix.attention_shares").split(",")]
    shares = [[float(size), float(share) * attention] for size, share in rows]
    return text.replace(line, f"attention_shares = {shares}")


def _run(chip_file: str, rows: Sequence[Row]) -> Iterator[Result]:
    launcher = [sys.executable, "-m", "ascend_emulator", "--clock", chip_file, "--dry", "--hbm", _DEVICE_MEMORY]
    if rows[0].host_bound:
        launcher.append("--host-operators")
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [*launcher, "-m", "benchmarks.published.step", rows[0].chip, *(row.name for row in rows)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
        )
        assert child.stdout is not None
        for row, line in zip(rows, child.stdout, strict=False):
            yield Result(row, float(line))
        if child.wait() != 0:
            errors.seek(0)
            raise RuntimeError(f"{rows[0].chip}: {errors.read()[-4000:]}")


def factor_of(chip: str) -> float:
    """The step factor in the chip's file."""
    return float(_figure(chip, "step.factor"))


def _figure(chip: str, name: str) -> str:
    return dict(each.split("=", 1) for each in machines.figures(chip, None).split(";"))[name]


def fit(results: Iterable[Result]) -> float:
    """By how much steps took longer than modelled, as a geometric mean of the rows that are for that; or 1."""
    logs = [math.log(each.row.milliseconds / each.modelled) for each in results if each.row.fitted]
    return math.exp(statistics.fmean(logs)) if logs else 1.0


def compare(results: Sequence[Result]) -> list[Comparison]:
    """Of the rows that one factor is for: each with what fits all others; with the file's where there are none."""
    first = results[0].row
    set_already = 1.0 if first.host_bound else factor_of(first.chip)
    comparisons = []
    for each in results:
        held_out = fit(other for other in results if other is not each)
        ratio = each.row.milliseconds / each.modelled
        comparisons.append(
            Comparison(each.row, each.modelled * held_out, ratio * set_already - 1, ratio / held_out - 1)
        )
    return comparisons
