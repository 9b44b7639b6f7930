"""The tables of docs/versions.md: which versions the tests were run with, of the files of `make matrix`.

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
MADE = "<!-- What follows is made by make versions-page. -->\n\n"


def row(result: dict[str, Any]) -> list[str]:
    found = {part["part"]: part for part in result["parts"]}
    dates = sorted({part["date"] for part in found.values()})
    return [
        result["python"],
        release(result),
        result["torch_npu"] or "-",
        " to ".join(dates[:: max(1, len(dates) - 1)]),
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


def page(about: str, results: Sequence[dict[str, Any]]) -> str:
    """about: what the page says before the tables."""
    head = ["Python", "torch", "torch_npu", "date", *PARTS.values()]
    lines = [head, ["---"] * len(head), *map(row, results)]
    text = about + MADE + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
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


def read_about() -> str:
    return PAGE.read_text().partition(MADE)[0]


def read(folder: Path) -> list[dict[str, Any]]:
    """The newest torch first."""
    results = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(results, key=lambda each: [int(part) for part in release(each).split(".")], reverse=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    PAGE.write_text(page(read_about(), read(RESULTS)))
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
