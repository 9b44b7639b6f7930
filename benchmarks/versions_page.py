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

Each push is tested with Python 3.11, torch 2.13 and torch_npu 2.13, in all schedules of the emulator. Others are
tested by `make matrix TORCH=2.12 PYTHON=python3.12`, which runs the tests that are not slow, in the eager schedule.
The page is made by `make versions-page` of the files in `benchmarks/results/versions/`.

A cell has the tests that passed, failed and were skipped. The race detector needs torch_npu 2.13, whose allocator
tells what it takes back: tests with an older one run without it. Files that need transformers, accelerate or
diffusers, which want a torch of their own, cannot be imported there, and count as failed.

"""


def row(result: dict[str, Any]) -> list[str]:
    found = {part["part"]: part["counts"] for part in result["parts"]}
    return [
        result["python"],
        release(result),
        result["torch_npu"] or "-",
        result["date"][:10],
        *(cell(found.get(part)) for part in PARTS),
    ]


def release(result: dict[str, Any]) -> str:
    """Of torch, without the build."""
    return str(result["torch"].split("+")[0])


def cell(counts: dict[str, int] | None) -> str:
    if counts is None:
        return "-"
    failed = counts.get("failed", 0) + counts.get("error", 0)
    return f"{counts.get('passed', 0):,} / {failed} / {counts.get('skipped', 0)}"


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
