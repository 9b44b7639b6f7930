"""The command line, run in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tiered_mem.cli import main


class Done(NamedTuple):
    """What a command has returned and written."""

    status: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> Done:
        status = main([str(argument) for argument in arguments])
        return Done(status, *capsys.readouterr())

    return run


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.once(why="it needs no device"))
