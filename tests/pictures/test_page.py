"""A page has all that it shows within itself."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

from tests.pictures.sample import chart, step_of
from tiered_mem.pictures.page import page
from tiered_mem.pictures.timeline import Timeline
from tiered_mem.trace.records import HostWait, Levels, Wait


class Parsed(HTMLParser):
    """The text of each element, by what it is, and the attributes and tags that there are."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.tags and data.strip():
            self.texts.append((self.tags[-1], data))

    def of(self, tag: str) -> list[str]:
        return [text for its, text in self.texts if its == tag]


def data_of(html: str) -> Any:
    found = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', html, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def test_it_needs_nothing_from_outside() -> None:
    html = page(Timeline.of(chart()).last(2))
    parsed = Parsed(html)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(parsed.tags)
    assert not {"src", "href", "srcset", "action", "data"} & {name for name, _ in parsed.attributes}
    for outside in (r"https?:", r"//[a-z]", r"@import", r"url\(", r"\bfetch\(", "XMLHttpRequest", r"\bimport[ (]"):
        code = re.sub(r"^// .*$", "", html, flags=re.MULTILINE)
        assert not re.search(outside, code), outside
    assert html.count("<!--") == 0


def test_its_data_is_that_of_the_trace() -> None:
    timeline = Timeline.of(chart()).last(2)
    assert data_of(page(timeline)) == json.loads(json.dumps(timeline.as_dict()))


def test_words_cannot_end_the_script_or_begin_a_tag() -> None:
    ill = "</script><b>&\u2028"
    timeline = Timeline.of(chart(advice=[ill], summary=[(ill, ill)], report=[(ill, ill)]))
    html = page(timeline)
    assert data_of(html)["advice"] == [ill]
    parsed = Parsed(html)
    assert "b" not in parsed.tags
    assert parsed.tags.count("script") == 2
    assert ill in parsed.of("td")


def test_all_that_the_manager_said_is_in_it() -> None:
    parsed = Parsed(page(Timeline.of(chart()).last(2)))
    assert parsed.of("h1") == ["npu:0, steps 1 to 2 of 2: 1800.0 ms"]
    assert list(zip(parsed.of("dt"), parsed.of("dd"), strict=True)) == [
        ("step 1", "1000.0 ms"),
        ("step 2", "800.0 ms"),
        ("most on the device", "290.0 MiB"),
        ("most on the host", "100.0 MiB"),
        ("most on the disk", "100.0 MiB"),
        ("device budget", "300.0 MiB"),
    ]
    assert parsed.of("td") == [
        *("300.0 MiB", "backward of layer 0: 50.0 ms", "backward of layer 1: <none> & nothing"),
        *("npu:0", "0"),
    ]
    assert "A budget of 280.0 MiB would do & <nothing> waits there either" in parsed.of("p")
    assert parsed.of("li") == [
        "100.0 ms in backward 0 until what it saved is back on the device",
        "40.0 ms in which the host waits for room in its memory",
    ]


def test_of_many_steps_the_fastest_and_the_slowest_are_told() -> None:
    many = [record for step in range(6) for record in step_of(step)]
    parsed = Parsed(page(Timeline.of(chart(records=many)).last(6)))
    told = list(zip(parsed.of("dt"), parsed.of("dd"), strict=True))
    assert told[:2] == [("the fastest of 6 steps", "800.0 ms"), ("the slowest", "1000.0 ms")]
    assert not [label for label, _ in told if label.startswith("step")]


def test_what_is_not_in_the_trace_is_said() -> None:
    records = [record for record in step_of(0) if not isinstance(record, Levels | Wait | HostWait)]
    nothing: dict[str, Any] = {"device budget bytes": None, "summary": None, "report": None, "advice": None}
    parsed = Parsed(page(Timeline.of(chart(records=records, **nothing))))
    told = " ".join(parsed.of("p"))
    for words in (
        "Compute waits for no copy.",
        "Nothing, as far as this trace tells.",
        "Device memory was not recorded",
        "Host memory was not recorded.",
        "There is no line for the budget",
    ):
        assert words in told
    assert (parsed.of("dt"), "table" in parsed.tags) == (["step 1"], False)
