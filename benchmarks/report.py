"""What a benchmark has found, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table


def report(result: Mapping[str, object], console: Console, path: Path | None) -> None:
    """Prints the figures, and writes them to `path` if there is one."""
    table = Table("figure", "value")
    for name, value in result.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")
