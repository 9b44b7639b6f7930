"""What a trace's file says of its steps equals what was put into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pictures.sample import ABOUT, MIB, STEP, chart, step_of, timed, write
from tiered_mem.pictures.timeline import Span, Timeline
from tiered_mem.pictures.words import advice, missing, step_times, title, waits
from tiered_mem.trace.records import HostWait, Layer, Levels, Wait


@pytest.mark.parametrize(
    ("at", "device", "host", "disk"),
    [
        (0.0, 100, 0, 0),
        (0.199, 100, 0, 0),
        (0.2, 200, 100, 0),
        (0.35, 290, 100, 100),
        (0.69, 290, 100, 100),
        (0.7, 250, 0, 0),
        (0.9, 100, 0, 0),
        (1.36, 290, 100, 100),
    ],
)
def test_the_bytes_in_each_tier(at: float, device: int, host: int, disk: int) -> None:
    timeline = Timeline.of(chart())
    found = [timeline.level(tier, at) for tier in ("device", "host", "disk")]
    assert found == [nbytes * MIB for nbytes in (device, host, disk)]


def test_before_a_tier_is_counted_nothing_is_known_of_it() -> None:
    timeline = Timeline.of(chart(records=[*step_of(0)[2:]]))
    assert timeline.level("device", 0.19) is None
    assert timeline.level("device", 0.2) == 200 * MIB
    assert timeline.level("network", 0.2) is None
    assert timeline.peak("network") is None


def test_the_spans_of_each_track() -> None:
    timeline = Timeline.of(chart(records=step_of(0)))
    assert timeline.spans == {
        "compute: layers": [
            Span("forward 0", 0.0, 0.2, layer="forward 0", graph=0),
            Span("forward 1", 0.2, 0.4, layer="forward 1", graph=0),
            Span("backward 1", 0.4, 0.6, layer="backward 1", graph=0),
            Span("backward 0", 0.6, 0.8, layer="backward 0", graph=0),
        ],
        "compute: waits": [Span("reload", 0.6, 0.65, layer="backward 0")],
        "copies: offload": [Span("offload", 0.2, 0.3, nbytes=100 * MIB)],
        "copies: reload": [Span("reload", 0.5, 0.65, nbytes=100 * MIB)],
        "host: waits": [Span("host waits", 0.3, 0.32)],
        "disk: writes": [Span("write", 0.3, 0.35, nbytes=100 * MIB)],
        "disk: reads": [Span("read", 0.4, 0.5, nbytes=100 * MIB)],
    }
    assert timeline.peak("device") == (0.35, 290 * MIB)
    assert (timeline.began, timeline.ended, timeline.steps) == (0.0, 0.8, (0.0,))


def test_the_last_step_begins_at_second_0() -> None:
    both = Timeline.of(chart())
    last = both.last(1)
    assert both.steps == (0.0, STEP)
    assert (last.steps, last.first_step, last.began) == ((0.0,), 2, 0.0)
    assert last.ended == pytest.approx(0.8)
    assert last.level("device", 0.0) == 100 * MIB
    assert last.level("device", 0.36) == 290 * MIB
    assert [(span.name, round(span.began, 6)) for span in last.spans["compute: layers"]] == [
        ("forward 0", 0.0),
        ("forward 1", 0.2),
        ("backward 1", 0.4),
        ("backward 0", 0.6),
    ]
    assert step_times(both) == pytest.approx([1.0, 0.8])
    assert title(both.last(2)) == "npu:0, steps 1 to 2 of 2: 1800.0 ms"
    assert title(last) == "npu:0, step 2 of 2: 800.0 ms"
    with pytest.raises(ValueError, match="at least 1 step is to be shown, not 0"):
        both.last(0)


def test_what_a_tier_has_when_a_step_begins_comes_from_before() -> None:
    """The file has a level only where it changes."""
    records = step_of(0) + [record for record in step_of(1) if not isinstance(record, Levels)]
    assert Timeline.of(chart(records=records)).last(1).levels["device"] == [(0.0, 100 * MIB)]


def test_several_forwards_are_one_step_while_a_backward_is_to_come() -> None:
    """As in a pipeline: F0 F1 B0 F2 B1 B2, and then the next step."""
    order = [(0, False), (1, False), (0, True), (2, False), (1, True), (2, True), (3, False), (3, True)]
    records = [timed(Layer(0, graph, 0, backward, True), float(at)) for at, (graph, backward) in enumerate(order)]
    assert Timeline.of(chart(records=records)).steps == (0.0, 6.0)


def test_a_forward_without_a_backward_is_no_step() -> None:
    order = [(0, False), (0, True), (1, False), (2, False), (2, True)]
    records = [timed(Layer(0, graph, 0, backward, True), float(at)) for at, (graph, backward) in enumerate(order)]
    assert Timeline.of(chart(records=records)).steps == (0.0, 3.0)


def test_files_at_the_same_time_have_lanes_of_their_own() -> None:
    records = [*step_of(0), *(record for record in step_of(0) if hasattr(record, "kind"))]
    writes = Timeline.of(chart(records=records)).spans["disk: writes"]
    assert [span.lane for span in writes] == [0, 1]


def test_it_is_said_what_waits() -> None:
    assert list(waits(Timeline.of(chart()).last(1))) == [
        "Compute waits 50.0 ms for copies, 6.2 % of the time.",
        "50.0 ms in backward 0 until what it saved is back on the device",
        "20.0 ms in which the host waits for room in its memory",
    ]
    nothing = [record for record in step_of(0) if not isinstance(record, Wait | HostWait)]
    assert list(waits(Timeline.of(chart(records=nothing)))) == ["Compute waits for no copy."]


def test_advice_is_the_managers_or_that_of_the_docs() -> None:
    assert list(advice(Timeline.of(chart()))) == ABOUT["advice"]
    told = list(advice(Timeline.of(chart(advice=[]))))
    assert told == [
        "Where a reload is waited for: reload earlier, or offload fewer layers.",
        "Where the host waits for room: give more host_bytes.",
    ]


def test_what_was_not_recorded_is_said() -> None:
    sampled = "Device memory is that where layers begin and end and where compute comes to a wait"
    (only,) = missing(Timeline.of(chart()))
    assert only.startswith(sampled)
    cpu = [timed(Levels(None, MIB, None), 0.0), *(r for r in step_of(0) if not isinstance(r, Levels))]
    found = Timeline.of(chart(records=cpu) | {"otherData": {"schema": 2, "older records left out": 7}})
    told = " ".join(missing(found))
    for words in ("torch counts none", "no disk tier", "no line for the budget", "7 older records"):
        assert words in told
    assert sampled not in told
    assert set(found.levels) == {"host"}
    assert (found.budget, found.summary, found.report, found.advice) == (None, [], [], [])


def without_schema() -> Any:
    old = chart()
    del old["otherData"]["schema"]
    return old


def with_event(**event: Any) -> Any:
    return chart() | {"traceEvents": [*chart()["traceEvents"], event]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (without_schema(), "it is a trace of version 1, and this tiered_mem shows version 2: export it again"),
        (chart(schema=3), "it is a trace of version 3, and this tiered_mem shows version 2"),
        ({"traceEvents": []}, "it is not a trace of tiered_mem's"),
        ({"traceEvents": [], "otherData": {}}, "it is not a trace of tiered_mem's"),
        ([1, 2], "it is not a trace of tiered_mem's"),
        (None, "it is not a trace of tiered_mem's"),
        (with_event(ph="X", name="odd"), "an event of it is not as a manager writes it (KeyError('tid'))"),
        (with_event(ph="C", name="host bytes", ts="soon"), "an event of it is not as a manager writes it"),
        (chart(records=[]), "no layer was recorded: train a step before"),
    ],
)
def test_a_file_that_is_no_such_trace_is_refused(tmp_path: Path, content: object, why: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="cannot be shown") as refused:
        Timeline.read(path)
    assert why in str(refused.value)
    assert str(refused.value).startswith(str(path))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00"])
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="cannot be shown: it is not JSON"):
        Timeline.read(path)


def test_a_file_is_read_as_it_was_made(tmp_path: Path) -> None:
    assert Timeline.read(write(tmp_path / "trace.json")) == Timeline.of(chart())
