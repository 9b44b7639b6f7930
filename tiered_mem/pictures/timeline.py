"""What happened in a trace's last steps: spans by track, and the bytes in each tier over time."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..trace.records import COPIES, FILES, HOST_WAITS, LAYERS, LEVELS, SCHEMA, WAITS

TRACKS = (LAYERS, WAITS, *COPIES.values(), HOST_WAITS, *FILES.values())


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took from `began` to `ended`, in seconds.

    lane: 0, or another number where its track had to show several things at once. nbytes: of copies and files.
    layer: of a layer and of a wait, by name; graph: the number of a layer's forward.
    """

    name: str
    began: float
    ended: float
    lane: int = 0
    nbytes: int | None = None
    layer: str = ""
    graph: int | None = None

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True)
class Timeline:
    """Times are in seconds.

    device: its name. began, ended: the time that is shown.
    steps: where steps begin; empty where they cannot be told apart. first_step: the number of the first one, of
        those that were recorded, from 1.
    spans: by track, in the order of their beginnings.
    levels: by tier, when it came to have so many bytes. A tier that was not counted is not there.
    budget: bytes that all memory of the device was to stay below, if there was a budget.
    left_out: how many older records were not kept.
    summary, report: what the manager said, as labels and values. advice: its own. Empty where the file has nothing
        of it.
    """

    device: str
    began: float
    ended: float
    steps: tuple[float, ...]
    first_step: int
    spans: Mapping[str, Sequence[Span]]
    levels: Mapping[str, Sequence[tuple[float, int]]]
    budget: int | None
    left_out: int
    summary: Sequence[tuple[str, str]]
    report: Sequence[tuple[str, str]]
    advice: Sequence[str]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Timeline:
        """Raises ValueError for what is no trace, or one of another version, and OSError."""
        try:
            return cls.of(json.loads(Path(path).read_text()))
        except ValueError as error:
            why = "it is not JSON" if isinstance(error, json.JSONDecodeError | UnicodeError) else str(error)
            raise ValueError(f"{path} cannot be shown: {why}; export_trace() of a manager writes a trace") from None

    @classmethod
    def of(cls, chart: object) -> Timeline:
        """chart: what `export_trace` writes. Raises ValueError for anything else."""
        about, events = _parts(chart)
        try:
            return _timeline(about, events)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"an event of it is not as a manager writes it ({error!r})") from None

    def last(self, steps: int) -> Timeline:
        """The last so many steps, from second 0 on. All of it where steps cannot be told apart."""
        if steps < 1:
            raise ValueError(f"at least 1 step is to be shown, not {steps}")
        begins = self.steps[-steps:]
        zero = begins[0] if begins else self.began
        spans = {
            track: [
                replace(each, began=max(each.began, zero) - zero, ended=each.ended - zero)
                for each in all_spans
                if each.ended > zero or each.began >= zero
            ]
            for track, all_spans in self.spans.items()
        }
        levels = {}
        for tier, changes in self.levels.items():
            at = bisect_right(changes, zero, key=lambda change: change[0])
            before = [(0.0, changes[at - 1][1])] if at else []
            levels[tier] = before + [(when - zero, nbytes) for when, nbytes in changes[at:]]
        return replace(
            self,
            began=0.0,
            ended=self.ended - zero,
            steps=tuple(each - zero for each in begins),
            first_step=self.first_step + len(self.steps) - len(begins),
            spans=spans,
            levels=levels,
        )

    def level(self, tier: str, at: float) -> int | None:
        """The bytes in a tier at a time; None before it was first counted, and where it is not."""
        changes = self.levels.get(tier, ())
        found = bisect_right(changes, at, key=lambda change: change[0])
        return changes[found - 1][1] if found else None

    def peak(self, tier: str) -> tuple[float, int] | None:
        """When a tier had the most bytes, and how many; None where it was not counted."""
        changes = self.levels.get(tier, ())
        return max(changes, key=lambda change: change[1]) if changes else None

    def as_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists, numbers and strings, as for JSON."""
        return asdict(self)


def _parts(chart: object) -> tuple[Mapping[str, Any], Sequence[Any]]:
    """What a file says beside the events, and the events."""
    about = chart.get("otherData") if isinstance(chart, dict) else None
    events = chart.get("traceEvents") if isinstance(chart, dict) else None
    if not isinstance(events, list) or not isinstance(about, dict) or "older records left out" not in about:
        raise ValueError("it is not a trace of tiered_mem's")
    schema = about.get("schema", 1)
    if schema != SCHEMA:
        raise ValueError(
            f"it is a trace of version {schema}, and this tiered_mem shows version {SCHEMA}: export it again, or "
            "open it in https://ui.perfetto.dev"
        )
    return about, events


def _timeline(about: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Timeline:
    named = {event["tid"]: str(event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    device = next((str(event["args"]["name"]) for event in events if event["name"] == "process_name"), "")
    counters = {counter: tier for tier, counter in LEVELS.items()}
    lanes: dict[str, list[int]] = defaultdict(list)
    spans: dict[str, list[Span]] = defaultdict(list)
    levels: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            track = named[event["tid"]].partition(",")[0]
            if event["tid"] not in lanes[track]:
                lanes[track].append(event["tid"])
            spans[track].append(_span(track, lanes[track].index(event["tid"]), event))
        elif event["ph"] == "C" and event["name"] in counters:
            levels[counters[event["name"]]].append((event["ts"] / 1e6, int(event["args"]["bytes"])))
    for each in spans.values():
        each.sort(key=lambda span: span.began)
    for changes in levels.values():
        changes.sort(key=lambda change: change[0])
    if not spans[LAYERS]:
        raise ValueError("no layer was recorded: train a step before")
    times = [each.began for track in spans.values() for each in track]
    times += [each.ended for track in spans.values() for each in track]
    times += [when for changes in levels.values() for when, _ in changes]
    return Timeline(
        device=device,
        began=min(times),
        ended=max(times),
        steps=tuple(_steps(spans[LAYERS])),
        first_step=1,
        spans={track: spans[track] for track in TRACKS if spans[track]},
        levels={tier: levels[tier] for tier in LEVELS if levels[tier]},
        budget=about.get("device budget bytes"),
        left_out=int(about["older records left out"]),
        summary=_rows(about.get("summary", ())),
        report=_rows(about.get("report", ())),
        advice=[str(each) for each in about.get("advice", ())],
    )


def _rows(said: Iterable[tuple[object, object]]) -> list[tuple[str, str]]:
    return [(str(label), str(value)) for label, value in said]


def _span(track: str, lane: int, event: Mapping[str, Any]) -> Span:
    args, began = event["args"], event["ts"] / 1e6
    layer = event["name"] if track == LAYERS else args.get("layer", "")
    ended = (event["ts"] + event["dur"]) / 1e6
    return Span(event["name"], began, ended, lane, args.get("bytes"), layer, args.get("graph"))


def _steps(layers: Sequence[Span]) -> Iterator[float]:
    """A step begins with a forward when each forward before it has come to its backward.

    Forwards without a backward, as of an evaluation, begin none.
    """
    trained = {span.graph for span in layers if span.name.startswith("backward")}
    known: set[int | None] = set()
    waiting: set[int | None] = set()
    for span in layers:
        if span.name.startswith("backward"):
            waiting.discard(span.graph)
        elif span.graph in trained - known:
            if not waiting:
                yield span.began
            known.add(span.graph)
            waiting.add(span.graph)
