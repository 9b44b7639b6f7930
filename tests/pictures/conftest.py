"""Pictures of traces, made by hand and by managers."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.once(why="what a picture shows is the same in each schedule"))
