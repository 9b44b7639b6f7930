"""Make a page of a trace's last steps: charts, what waits, what would help, and all figures.

TRACE is a file that a manager's export_trace() wrote. The page is one HTML file that needs no network.
"""

from __future__ import annotations

import argparse

from ..pictures.page import page
from ..pictures.timeline import Timeline
from .plot import add_trace, tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace(parser, "the page (TRACE's name with .html)")


def run(options: argparse.Namespace) -> int:
    path = options.output or options.trace.with_suffix(".html")
    timeline = Timeline.read(options.trace).last(options.steps)
    path.write_text(page(timeline), encoding="utf-8")
    tell(timeline, path, as_json=options.json)
    return 0
