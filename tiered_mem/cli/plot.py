"""Draw a trace's last steps: memory of each tier and the budget, layers, waits and copies.

TRACE is a file that a manager's export_trace() wrote. The picture is what its plot() would have drawn then.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..pictures.drawing import draw, drawable
from ..pictures.timeline import Timeline
from ..pictures.words import missing, title
from .output import console, plain, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace(parser, "a .png or .svg (TRACE's name with .png)")


def run(options: argparse.Namespace) -> int:
    path = options.output or options.trace.with_suffix(".png")
    drawable(path)
    timeline = Timeline.read(options.trace).last(options.steps)
    draw(timeline, path)
    tell(timeline, path, as_json=options.json)
    return 0


def add_trace(parser: argparse.ArgumentParser, output: str) -> None:
    """The options of a command that shows a trace, with what is said of its output."""
    parser.add_argument("trace", metavar="TRACE", type=Path, help="a file that export_trace() wrote")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help=output)
    parser.add_argument("--steps", type=int, default=2, help="how many of the last steps to show (2)")


def tell(timeline: Timeline, path: Path, *, as_json: bool) -> None:
    """Says what was written, and what it could not show."""
    notes = list(missing(timeline))
    if as_json:
        write_json({"file": str(path), "shown": title(timeline), "not_shown": notes})
        return
    screen = console()
    for line in (f"{path}: {title(timeline)}", *notes):
        screen.print(plain(line), soft_wrap=True)
