"""A timeline is drawn to a file that can be shown, with its labels."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from tests.pictures.sample import chart, step_of
from tiered_mem.pictures.drawing import draw
from tiered_mem.pictures.timeline import Timeline
from tiered_mem.trace.records import FileMove, Levels

BUDGET_LINE = re.compile(r'style="[^"]*stroke-dasharray[^"]*stroke: #b5301c')


def texts(path: Path) -> list[str]:
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return ["".join(each.itertext()).strip() for each in root.iter("{http://www.w3.org/2000/svg}text")]


def test_an_svg_has_all_labels(tmp_path: Path) -> None:
    draw(Timeline.of(chart()).last(2), tmp_path / "step.svg")
    found = texts(tmp_path / "step.svg")
    for label in (
        "npu:0, steps 1 to 2 of 2: 1800.0 ms",
        "memory, MiB",
        "device time, ms",
        "device, at most 290.0 MiB",
        "host, at most 100.0 MiB",
        "disk, at most 100.0 MiB",
        "budget 300.0 MiB",
        "layers",
        "compute waits",
        "to the host",
        "to the device",
        "host waits",
        "disk writes",
        "disk reads",
        "forward",
        "backward",
    ):
        assert label in found
    assert "none" not in found
    assert BUDGET_LINE.search((tmp_path / "step.svg").read_text())


def test_a_png_is_an_image(tmp_path: Path) -> None:
    draw(Timeline.of(chart()), tmp_path / "step.PNG")
    with Image.open(tmp_path / "step.PNG") as image:
        assert image.format == "PNG"
        assert image.width > image.height > 400
        colours = image.convert("RGB").getcolors(1 << 24)
    assert colours is not None
    assert {(0x0B, 0x5F, 0xA5), (0xA0, 0x5A, 0x00), (0xB5, 0x30, 0x1C)} <= {colour for _, colour in colours}


def test_what_was_not_recorded_is_not_drawn(tmp_path: Path) -> None:
    records = [record for record in step_of(0) if not isinstance(record, Levels | FileMove)]
    timeline = Timeline.of(chart(records=records, **{"device budget bytes": None}))
    draw(timeline, tmp_path / "step.svg")
    found = texts(tmp_path / "step.svg")
    assert "memory was not recorded" in found
    assert "disk writes" not in found
    assert not BUDGET_LINE.search((tmp_path / "step.svg").read_text())
    assert not [text for text in found if "at most" in text or text.startswith("budget")]
    assert "Device memory was not recorded: torch counts none for this device." in " ".join(found)


def test_the_same_timeline_is_the_same_file(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        draw(Timeline.of(chart()), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@pytest.mark.parametrize("name", ["step.pdf", "step", "png"])
def test_another_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"ends in \.png or \.svg, not to .*" + name):
        draw(Timeline.of(chart()), tmp_path / name)
    assert not (tmp_path / name).exists()


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'tiered_mem\[plot\]'"):
        draw(Timeline.of(chart()), tmp_path / "step.png")
