"""docs/versions.md: which versions the tests were run with, of the files of `make matrix`.

python -m benchmarks.versions_page          # of benchmarks/results/versions/*.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versions"
PAGE = ROOT / "docs" / "versions.md"
PARTS = {"cpu": "tiered_mem, CPU", "npu": "tiered_mem, emulated NPU", "emulator": "the emulator's own"}
ABOUT = """# Versions

Each push is tested with Python 3.11, torch 2.13 and torch_npu 2.13, in all schedules of the emulator, and by a
few tests with 2.14 (`make matrix-quick`). Others are tested by `make matrix TORCH=2.12 PYTHON=python3.12`,
which runs the tests that are not slow, in the eager schedule. The page is made by `make versions-page` of the
files in `benchmarks/results/versions/`.

A cell has the tests that passed, failed and were skipped; "a few" are those of `make matrix-quick`. The
emulator takes torch_npu 2.9 to 2.14. Its race detector is on where torch_npu's allocator tells what it takes
back: in 2.13 and 2.14, and in the last releases of those before, such as 2.12.0.post3. Of 2.9 that is 2.9.0.post9,
for which say `TORCH=2.9.0`. `TORCH=2.9` takes 2.9.1, which is older, and was not run: the emulator has all
functions without which it is not loaded (`emulator/missing_symbols.py`).

The rows of 2.11 and 2.12 are of 26 November 2026 and of first releases. Since then the libraries of models are
installed with the tests, and tests of what an older torch_npu lacks, such as `npurt()`, are skipped there; the
two rows were not run again. Nor were those of 2.14 and 2.10, each with one failure. The launcher, of which that of
2.14 is, has changed since. That of 2.10 is skipped now: with torch's CUDA build it is CUPTI that a profiler asks.
Of the four of 2.9 three were mended after the row was run, and pass there: the tests took it for granted that
copies are slower than the host, and that no seed is given to a graph that draws no numbers. The fourth, memory of a
graph that is reset, is left: behind other tests 102 MiB stay reserved there, alone 2 MiB; why is not known.

On x86, PyPI has torch as a CUDA build only. Beside that, newer torch_npus such as 2.10.0.post7 end the process
as they are loaded: install the CPU build that torch_npu's wheel asks for. On the emulator, with which the tests
ran, either build does.

"""


def row(result: dict[str, Any]) -> list[str]:
    found = {part["part"]: part for part in result["parts"]}
    return [
        result["python"],
        release(result),
        result["torch_npu"] or "-",
        result["date"][:10],
        *(cell(found[part]) if part in found else "-" for part in PARTS),
    ]


def release(result: dict[str, Any]) -> str:
    """Of torch, without the build."""
    return str(result["torch"].split("+")[0])


def cell(part: dict[str, Any]) -> str:
    counts = part["counts"]
    failed = counts.get("failed", 0) + counts.get("error", 0)
    told = f"{counts.get('passed', 0):,} / {failed} / {counts.get('skipped', 0)}"
    return f"{told}, a few" if part.get("quick") else told


def page(results: Sequence[dict[str, Any]]) -> str:
    head = ["Python", "torch", "torch_npu", "date", *PARTS.values()]
    lines = [head, ["---"] * len(head), *map(row, results)]
    text = ABOUT + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    failures = [
        f"- torch {release(result)}, {PARTS[part['part']]}: `{from_root(part['part'], each['test'])}`"
        for result in results
        for part in result["parts"]
        for each in part["failed"]
    ]
    return text + ("\n## What failed\n\n" + "\n".join(failures) + "\n" if failures else "")


def from_root(part: str, name: str) -> str:
    """Its name from the repository's root: pytest has it from the nearest pyproject.toml."""
    return f"emulator/{name}" if part == "emulator" else name


def read(folder: Path) -> list[dict[str, Any]]:
    """The newest torch first."""
    results = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(results, key=lambda each: [int(part) for part in release(each).split(".")], reverse=True)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(read(RESULTS)))
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
