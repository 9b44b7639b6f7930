"""Draws a timeline with matplotlib, which is imported only here."""

from __future__ import annotations

import os
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..sizes import format_bytes
from ..trace.records import COPIES, FILES, HOST_WAITS, LAYERS, WAITS
from .timeline import Span, Timeline
from .words import missing, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SUFFIXES = (".png", ".svg")
# Can be told apart by eyes of any kind, and read on white.
_TIERS = {"device": "#0b5fa5", "host": "#a05a00", "disk": "#00705a"}
_BUDGET = "#b5301c"
_FORWARD, _BACKWARD = "#5b9fd6", "#0b5fa5"
_FORWARD_TEXT = "#2b74b0"
_BESIDE = ("axes fraction", "data")
_ROWS = {
    LAYERS: "layers",
    WAITS: "compute waits",
    COPIES["offload"]: "to the host",
    COPIES["reload"]: "to the device",
    HOST_WAITS: "host waits",
    FILES["write"]: "disk writes",
    FILES["read"]: "disk reads",
}
_COLOURS = {
    WAITS: _BUDGET,
    COPIES["offload"]: _TIERS["host"],
    COPIES["reload"]: "#3d8f7f",
    HOST_WAITS: _BUDGET,
    FILES["write"]: _TIERS["disk"],
    FILES["read"]: "#5a9a86",
}
_STYLE: dict[Any, object] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text that can be searched, and read aloud
    "svg.hashsalt": "tiered_mem",  # the same picture is the same file
}
_GIB, _MIB = 1 << 30, 1 << 20


def drawable(path: str | os.PathLike[str]) -> None:
    """Raises ValueError for a file that is neither PNG nor SVG, and ImportError where matplotlib is missing."""
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise ValueError(f"a picture is written to a file whose name ends in .png or .svg, not to {str(path)!r}")
    if find_spec("matplotlib") is None:
        raise ImportError("pictures are drawn by the package matplotlib: pip install 'tiered_mem[plot]'")


def draw(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Memory of each tier with the budget, and below it layers, waits and copies. Raises as `drawable` does."""
    drawable(path)
    import matplotlib
    from matplotlib.figure import Figure

    rows = [track for track in _ROWS if timeline.spans.get(track) or track in (LAYERS, WAITS, *COPIES.values())]
    notes = textwrap.wrap(" ".join(missing(timeline)), 165)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11, 3.9 + 0.36 * len(rows) + 0.17 * len(notes)), layout="constrained")
        memory, tracks = figure.subplots(
            2, 1, sharex=True, height_ratios=[3.1, 0.36 * len(rows)], gridspec_kw={"hspace": 0.04}
        )
        figure.suptitle(title(timeline), x=0.01, ha="left", weight="bold")
        _memory(memory, timeline)
        _tracks(tracks, timeline, rows)
        for begin in timeline.steps[1:]:
            for axes in (memory, tracks):
                axes.axvline(_ms(begin), color="#666666", linewidth=0.8, linestyle=":")
        figure.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=8, color="#555555")
        date = {"Date": None} if Path(path).suffix.lower() == ".svg" else {}
        figure.savefig(path, dpi=120, metadata=date)


def _memory(axes: Axes, timeline: Timeline) -> None:
    most = max((found[1] for tier in timeline.levels if (found := timeline.peak(tier))), default=0)
    most = max(most, timeline.budget or 0)
    unit, name = (_GIB, "GiB") if most >= _GIB else (_MIB, "MiB")
    ends: list[tuple[float, str, str]] = []
    for tier, changes in timeline.levels.items():
        xs = [_ms(when) for when, _ in changes] + [_ms(timeline.ended)]
        ys = [nbytes / unit for _, nbytes in changes] + [changes[-1][1] / unit]
        axes.plot(xs, ys, drawstyle="steps-post", color=_TIERS[tier], linewidth=1.8)
        found = timeline.peak(tier)
        told = f"{tier}, at most {format_bytes(found[1])}" if found else tier
        ends.append((ys[-1], told, _TIERS[tier]))
    if timeline.budget is not None:
        axes.axhline(timeline.budget / unit, color=_BUDGET, linewidth=1.4, linestyle="--")
        ends.append((timeline.budget / unit, f"budget {format_bytes(timeline.budget)}", _BUDGET))
    if not ends:
        axes.text(0.5, 0.5, "memory was not recorded", transform=axes.transAxes, ha="center", color="#555555")
    top = 1.08 * most / unit or 1.0
    for (_, text, colour), y in zip(sorted(ends), _apart([y for y, *_ in sorted(ends)], 0.075 * top), strict=True):
        axes.annotate(
            text, (1.01, y / top), xycoords="axes fraction", color=colour, va="center", annotation_clip=False
        )
    axes.set_ylim(0, top)
    axes.set_xlim(0, _ms(timeline.ended))
    axes.set_ylabel(f"memory, {name}")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)


def _tracks(axes: Axes, timeline: Timeline, rows: list[str]) -> None:
    for place, track in enumerate(rows):
        spans = timeline.spans.get(track, ())
        lanes = 1 + max((span.lane for span in spans), default=0)
        for lane in range(lanes):
            here = [span for span in spans if span.lane == lane]
            for some, colour in _coloured(track, here):
                bars = [(_ms(span.began), _ms(span.seconds)) for span in some]
                low = place - 0.38 + 0.76 * lane / lanes
                # What is short is still a line; layers follow each other, and are told apart by their edges.
                edge = "white" if track == LAYERS else colour
                axes.broken_barh(bars, (low, 0.76 / lanes), facecolors=colour, edgecolor=edge, linewidth=0.5)
        if not spans:
            axes.text(0.0, place, " none", va="center", fontsize=8, color="#555555")
    axes.set_yticks(range(len(rows)), [_ROWS[track] for track in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("device time, ms")
    for colour, words, down in ((_FORWARD_TEXT, "forward", -0.22), (_BACKWARD, "backward", 0.22)):
        axes.annotate(
            words, (1.01, down), xycoords=_BESIDE, color=colour, va="center", fontsize=9, annotation_clip=False
        )


def _coloured(track: str, spans: list[Span]) -> list[tuple[list[Span], str]]:
    if track != LAYERS:
        return [(spans, _COLOURS[track])]
    backward = [span for span in spans if span.name.startswith("backward")]
    return [([span for span in spans if span not in backward], _FORWARD), (backward, _BACKWARD)]


def _apart(places: list[float], least: float) -> list[float]:
    """The places, which rise, moved up as far as it takes to have so much between them."""
    found: list[float] = []
    for place in places:
        found.append(max(place, found[-1] + least) if found else place)
    return found


def _ms(seconds: float) -> float:
    return seconds * 1e3
