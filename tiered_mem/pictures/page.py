"""A timeline as one HTML page, which needs nothing beside it: no network, and no other file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from ..sizes import format_seconds
from .timeline import Timeline
from .words import advice, missing, peaks, step_times, title, waits

# More steps than that are told by the fastest and the slowest.
_MOST_TILES = 4


def page(timeline: Timeline) -> str:
    """The page. The data that its charts are drawn from by its script are the timeline's as_dict()."""
    report = list(timeline.report)
    labels = [label for label, _ in report]
    if "advice" in labels:  # which has a section of its own
        report = report[: labels.index("advice")]
    times = step_times(timeline)
    tiles = [(f"step {number}", format_seconds(t)) for number, t in enumerate(times, timeline.first_step)]
    if len(tiles) > _MOST_TILES:
        tiles = [(f"the fastest of {len(tiles)} steps", format_seconds(min(times)))]
        tiles += [("the slowest", format_seconds(max(times)))]
    first, *longest = waits(timeline)
    helps = list(advice(timeline)) or ["nothing, as far as this trace tells."]
    parts = {
        "TITLE": escape(title(timeline)),
        "TILES": "".join(
            f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd></div>" for a, b in [*tiles, *peaks(timeline)]
        ),
        "WAITS": _paragraphs([first]) + _list(longest),
        "ADVICE": _paragraphs(helps),
        "REPORT": _table("What the plan promises, and what came of it", report),
        "SUMMARY": _table("All since the manager was made, up to the export", timeline.summary),
        "MISSING": _paragraphs(missing(timeline)),
        # "<" could end the script early.
        "DATA": json.dumps(timeline.as_dict()).replace("<", "\\u003c"),
    }
    made = (files(__package__) / "page.html").read_text()
    for name, text in parts.items():
        made = made.replace(f"<!--{name}-->", text)
    return made


def _paragraphs(sentences: Iterable[str]) -> str:
    return "".join(f"<p>{escape(text[:1].upper() + text[1:])}</p>" for text in sentences)


def _list(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>" if texts else ""


def _table(caption: str, rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(
        f'<tr><th scope="row">{escape(label)}</th><td>{escape(value)}</td></tr>' for label, value in rows
    )
    return f"<table><caption>{escape(caption)}</caption><tbody>{body}</tbody></table>" if body else ""
