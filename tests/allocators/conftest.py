"""Allocators know addresses and numbers: their tests are the same in each schedule."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.once(why="it runs nothing on a device"))
