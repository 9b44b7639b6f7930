"""For pytest: `--ascend` starts the device, and with the race detector on, a test that causes a race fails."""

from collections.abc import Iterator

import pytest

from ascend_emulator.errors import EmulatorError
from ascend_emulator.races import clear_races, races
from ascend_emulator.runtime import is_running, runtime
from ascend_emulator.startup import start


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("ascend_emulator").addoption(
        "--ascend",
        action="store_true",
        help="start the emulated NPU before the tests and their conftest.py are imported; its options are the "
        "environment's, such as ASCEND_EMULATOR_RACES=1",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    if early_config.known_args_namespace.ascend:
        try:
            start()
        except EmulatorError as error:
            raise pytest.UsageError(f"--ascend: {error}") from None


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
