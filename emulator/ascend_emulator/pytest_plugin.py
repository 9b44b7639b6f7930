"""For pytest: with the race detector on, a test that causes a race fails."""

from collections.abc import Iterator

import pytest

from ascend_emulator.races import clear_races, races
from ascend_emulator.runtime import is_running, runtime


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    """Fails the test if a race was found while it ran. A test that makes one on purpose calls clear_races()."""
    if not (is_running() and runtime().ascend_emulator_watches_races()):
        yield
        return
    clear_races()
    yield
    runtime().aclrtSynchronizeDevice()  # what this test left is not the next one's
    found = races()
    clear_races()
    if found:
        pytest.fail("\n\n".join(str(race) for race in found), pytrace=False)
