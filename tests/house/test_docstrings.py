"""Whatever users call says what each argument is, in Google's form, which editors and other tools read."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.house.test_public_names import PUBLIC, THEIRS

pytestmark = pytest.mark.once(why="it needs no device")

SECTIONS = ("Args", "Returns", "Raises", "Attributes")


def is_ours(function: object) -> bool:
    return str(getattr(function, "__module__", "")).startswith("tiered_mem")


def public_callables() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """The name, the function and the docstring of each. A constructor's is that of its class."""
    for module in sorted(PUBLIC.keys() - THEIRS):
        for name in PUBLIC[module].split():
            thing = getattr(importlib.import_module(module), name)
            if inspect.isclass(thing):
                if is_ours(thing.__init__):
                    yield f"{module}.{name}", thing.__init__, inspect.getdoc(thing) or ""
                for method, function in inspect.getmembers(thing, inspect.isroutine):
                    if is_ours(function) and not method.startswith("_"):
                        yield f"{module}.{name}.{method}", function, inspect.getdoc(getattr(thing, method)) or ""
            elif inspect.isroutine(thing):
                yield f"{module}.{name}", thing, inspect.getdoc(thing) or ""


CALLABLES = list(public_callables())


def section(text: str, name: str) -> str:
    """The lines under a heading, "" where there is none."""
    found = re.search(rf"^{name}:\n((?:    .*\n|\n)+)", f"{text}\n", re.MULTILINE)
    return found[1] if found else ""


def entries(text: str) -> list[str]:
    return re.findall(r"^    (\**[\w.]+): \S", text, re.MULTILINE)


def test_there_are_many() -> None:
    names = {name for name, *_ in CALLABLES}
    assert {"tiered_mem.TieringManager", "tiered_mem.TieringManager.offload", "tiered_mem.configure"} <= names
    assert {"tiered_mem.policies.Offload", "tiered_mem.policies.Policy.decide"} <= names
    assert {"tiered_mem.allocators.SlabPool.allocate", "tiered_mem.allocators.HostPool.slab"} <= names


@pytest.mark.parametrize(("name", "function", "text"), CALLABLES, ids=[name for name, *_ in CALLABLES])
def test_each_argument_is_said(name: str, function: Callable[..., Any], text: str) -> None:
    stars = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    parameters = [
        stars.get(each.kind, "") + each.name
        for each in inspect.signature(function).parameters.values()
        if each.name != "self"
    ]
    assert entries(section(text, "Args")) == parameters


@pytest.mark.parametrize(("name", "function", "text"), CALLABLES, ids=[name for name, *_ in CALLABLES])
def test_errors_are_said_in_their_section(name: str, function: Callable[..., Any], text: str) -> None:
    assert not re.search(r"(?:^|\. )Raises (?!what)[A-Z]\w+", text, re.MULTILINE)
    for heading in SECTIONS:
        assert (f"\n{heading}:\n" in text) == bool(section(text, heading))
