"""Links among the documents lead to files and headings that there are, and files that they name are there."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.test_layers import ROOT

pytestmark = pytest.mark.once(why="it needs no device")

DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *(ROOT / "emulator").glob("*.md"),
        *(ROOT / "emulator/docs").glob("*.md"),
    ]
)

NOT_OURS = {"first.py": "what the reader writes", "pretrain_gpt.py": "MindSpeed's"}


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


@pytest.fixture(scope="module")
def sources() -> list[Path]:
    return [*ROOT.glob("[!.]*/**/*.py")]


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS.rglob("*.md")], ids=lambda page: page.name)
def test_files_and_modules_that_are_named_are_there(page: Path, sources: list[Path]) -> None:
    text = " ".join(page.read_text().split())
    named = set(re.findall(r"`([\w/]+\.py)`", text)) - NOT_OURS.keys()
    modules = set(re.findall(r"python -m ((?:benchmarks|tests)[.\w]*\w)", text))
    missing = [name for name in named if not any(path.match(name) for path in sources)]
    missing += [name for name in modules if importlib.util.find_spec(name) is None]
    assert missing == []


def test_each_page_is_in_the_index() -> None:
    """By the index of its folder, which is in that of the documents."""
    for page in set(DOCS.rglob("*.md")) - {DOCS / "index.md"}:
        index = (page.parent.parent if page.name == "index.md" else page.parent) / "index.md"
        assert f"({page.relative_to(index.parent)}" in index.read_text(), f"{page} is not in {index}"


def test_each_page_is_in_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = [str(page.relative_to(ROOT)) for page in PAGES]
    assert [page for page in pages if page not in navigation] == []
