"""How results are shown: tables for people, JSON for programs, and a bar for what takes long."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

# Where there is no terminal, whose width it were: a line of a table shall not be broken.
_WIDE = 200


def console() -> Console:
    """The standard output. What is printed is no markup: names may hold brackets."""
    width = None if sys.stdout.isatty() else _WIDE
    return Console(markup=False, highlight=False, emoji=False, soft_wrap=False, width=width)


def write_json(result: object) -> None:
    """As text to the standard output."""
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


def table(title: str, columns: Mapping[str, bool], rows: Iterable[Iterable[object]]) -> Table:
    """columns: by name, whether they hold numbers."""
    made = Table(title=plain(title), title_justify="left", title_style="bold")
    for name, numbers in columns.items():
        made.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(plain(str(cell)) for cell in row))
    return made


def byte_bar() -> Progress:
    """A bar on the standard error, which is gone afterwards; nothing where that is no terminal."""
    where = Console(stderr=True, markup=False, emoji=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    return Progress(*columns, console=where, transient=True, disable=not where.is_terminal)


def plain(text: str) -> str:
    """The text without what a terminal would take for a command, as names of files may hold anything."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
