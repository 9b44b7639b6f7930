"""Output: tables for people, JSON for programs, and a progress bar. And the sizes among the options."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..sizes import parse_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

# Of the JSON that is written. It goes up when a key goes, or means another thing; a further key leaves it.
_SCHEMA = 1
# In characters. Where there is no terminal with a width of its own, lines of a table are not broken.
_WIDE = 200


def check_rich() -> None:
    """Raises ImportError where the package is missing that draws tables and the bar."""
    if find_spec("rich") is None:
        raise ImportError("what it finds is shown by the package rich: pip install 'tiered_mem[cli]'")


def console() -> Console:
    """The standard output. Text is not taken for markup, for names may hold brackets."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDE
    return Console(markup=False, highlight=False, emoji=False, soft_wrap=False, width=width)


def write_json(result: Mapping[str, object], path: Path | None = None) -> None:
    """Writes `result` as JSON to a file, or the standard output, with the version of what its keys mean."""
    text = json.dumps({"schema": _SCHEMA, **result}, indent=1) + "\n"
    if path is None:
        sys.stdout.write(text)
    else:
        path.write_text(text)


def with_units(found: Mapping[str, object], units: Mapping[str, str]) -> dict[str, object]:
    """What was found, and once more by names that end in their units, which the names from before lack.

    units: by the names that lack them, such as {"write": "gb_per_s"}.
    """
    return {**found, **{f"{name}_{unit}": found[name] for name, unit in units.items() if name in found}}


def table(title: str, columns: Mapping[str, bool], rows: Iterable[Iterable[object]]) -> Table:
    """A table. columns: for each name, whether the column holds numbers."""
    from rich.table import Table

    made = Table(title=plain(title), title_justify="left", title_style="bold")
    for name, numbers in columns.items():
        made.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(plain(str(cell)) for cell in row))
    return made


def byte_bar() -> Progress:
    """A bar on the standard error that vanishes in the end; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    where = Console(stderr=True, markup=False, emoji=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    return Progress(*columns, console=where, transient=True, disable=not where.is_terminal)


def part_bar() -> Progress:
    """A bar that counts parts, where and while `byte_bar` shows one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    where = Console(stderr=True, markup=False, emoji=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=where, transient=True, disable=not where.is_terminal)


def plain(text: str) -> str:
    """The text without control characters, as names of files may hold anything."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def size(text: str) -> int:
    """The type of an option that is a size, such as 4GiB."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
