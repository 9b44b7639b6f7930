"""docs/troubleshooting.md has each warning of the product by its words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.test_layers import PRODUCT, ROOT, tree_of

pytestmark = pytest.mark.once(why="it needs no device")

PAGE = ROOT / "docs" / "troubleshooting.md"
PLACEHOLDERS = re.compile(r"%[.\d]*[srdf]|\{\}")


def warnings_of(path: Path) -> Iterator[str]:
    """The messages, with placeholders in them, that a file logs or issues as warnings."""
    tree = tree_of(path)
    named = {
        target.id: text(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            owner = getattr(node.func.value, "id", "")
            if (owner, node.func.attr) in (("_log", "warning"), ("warnings", "warn")):
                for each in ast.walk(node.args[0]):
                    if isinstance(each, ast.Name) and named.get(each.id):
                        yield named[each.id]
                if found := text(node.args[0]):
                    yield found


def text(node: ast.expr) -> str:
    """A string as it is written, with {} for what is put into it; "" for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text(each) or "{}" for each in node.values)
    return ""


def beginning(message: str) -> str:
    """The first words that are the same each time: five, or as many as stand between two placeholders."""
    parts = [part.strip(" :,.") for part in PLACEHOLDERS.split(message)]
    longest = next((part for part in parts if len(part.split()) >= 4), max(parts, key=len))
    return " ".join(longest.split()[:5])


WARNINGS = sorted({each for path in PRODUCT for each in map(beginning, warnings_of(path)) if each})


def test_there_are_warnings() -> None:
    assert len(WARNINGS) > 20


@pytest.mark.parametrize("words", WARNINGS)
def test_a_warning_is_explained(words: str) -> None:
    page = " ".join(PAGE.read_text().split())
    assert words in page, f"{PAGE.name} says nothing of it"
