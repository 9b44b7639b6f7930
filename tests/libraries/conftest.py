"""Models of libraries take long to import: `make test-models` runs them."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.once(why="make test-models has the other schedules"))
