"""Links among the documents lead to files and headings that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.test_layers import ROOT

pytestmark = pytest.mark.once(why="it needs no device")

FOLDERS = (ROOT, ROOT / "docs", ROOT / "emulator", ROOT / "emulator" / "docs")
PAGES = sorted(page for folder in FOLDERS for page in folder.glob("*.md"))


def headings(page: Path) -> Iterator[str]:
    """As they are linked to."""
    for line in page.read_text().splitlines():
        if line.startswith("#"):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip().lower())
            yield re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", words))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for path, _, heading in (link.partition("#") for link in links if not link.startswith("http")):
        target = page.parent / path if path else page
        assert target.exists(), f"{path} is not there"
        assert not heading or heading in set(headings(target)), f"{path} has no #{heading}"


def test_each_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert sorted(page for page in pages if f"({page}" not in index) == []
