"""Where tests lie, which marks there are, and that what is written of tests names those that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutants import INTERRUPTS, SUBJECTS

pytestmark = pytest.mark.once(why="it needs no device")

ROOT = Path(__file__).parents[2]
TESTS = (ROOT / "tests", ROOT / "emulator" / "tests")
TOLD_IN = [
    ROOT / "Makefile",
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "emulator" / "README.md",
    *(ROOT / "docs").rglob("*.md"),
]


def test_each_test_file_lies_in_a_folder() -> None:
    assert sorted(path.name for path in (ROOT / "tests").glob("test_*.py")) == [], "put it where the source has it"


def marks(project: Path) -> set[str]:
    """What a pyproject.toml registers, without what the marks take and mean."""
    (registered,) = re.findall(r"^markers = \[\n(.*?)^\]", project.read_text(), re.MULTILINE | re.DOTALL)
    return set(re.findall(r'^ +"(\w+)\(', registered, re.MULTILINE))


def test_the_makefile_chooses_by_marks_that_there_are() -> None:
    """With a mark that nobody has, or a folder that has moved, CI would leave out nothing, or all."""
    text = (ROOT / "Makefile").read_text()
    chosen = {word for choice in re.findall(r"-m '([^']+)'", text) for word in re.findall(r"\w+", choice)}
    chosen |= set(re.findall(r"\$\(PYTEST\) -m (\w+)", text))
    chosen -= {"and", "not", "or"}
    assert {"once", "slow"} <= chosen <= marks(ROOT / "pyproject.toml")
    assert "--ignore" not in text
    assert "--deselect" not in text


def test_the_emulator_by_itself_has_the_same_marks() -> None:
    assert marks(ROOT / "emulator" / "pyproject.toml") == marks(ROOT / "pyproject.toml")


@pytest.mark.parametrize("document", TOLD_IN, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_tests_that_a_document_names_are_there(document: Path) -> None:
    text = document.read_text()
    paths = {path.rstrip(".") for path in re.findall(r"(?<![\w/.])(?:emulator/)?tests/[\w/.*]+", text)}
    assert sorted(path for path in paths if not any(ROOT.glob(path))) == []
    names = set(re.findall(r"\btest_\w+\.py\b", text))
    assert sorted(names - {path.name for folder in TESTS for path in folder.rglob("test_*.py")}) == []


def test_the_tests_that_have_to_find_mutants_are_there() -> None:
    files = {test.partition("::")[0] for test in (*INTERRUPTS, *(test for each in SUBJECTS for test in each.tests))}
    assert sorted(file for file in files if not (ROOT / file).is_file()) == []
