"""Trainings on several emulated NPUs; with a real device under test these are left out."""

import pytest

from tests.conftest import EMULATED

if not EMULATED:
    collect_ignore_glob = ["test_*.py"]


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.slow(why="each rank imports torch"))
    item.add_marker(pytest.mark.ranks(why="it is about several of them"))
    item.add_marker(pytest.mark.once(why="its processes have a schedule of their own"))
