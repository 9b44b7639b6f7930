"""A scene for a trace, whose tests are the same in each schedule: the link makes the durations."""

from collections.abc import Iterator

import pytest

from tests.trace.scene import Scene


@pytest.fixture
def scene(device: str) -> Iterator[Scene]:
    """A trace that has recorded nothing yet."""
    scene = Scene(device)
    yield scene
    scene.finish()


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.once(why="what a trace tells is the same in each schedule"))
