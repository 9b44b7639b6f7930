"""The tests run on the emulated NPU, on a real one where there is one, or on what TIERED_MEM_TEST_DEVICE names.

With "cuda" or "cpu" there, they need neither the emulator nor torch_npu, and not all packages that `make setup`
installs: what a missing one is needed for is skipped.

With SLOW_SHARE=0/8 an eighth of the files have their slow tests, and the others leave theirs out; the last is 7/8.
"""

import gc
import os
import sys
import traceback
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from emulator.tests import emulated_device
from emulator.tests.emulated_device import (
    NO_RELEASE,
    Link,
    careless,
    link,
    pytest_runtest_setup,
    skipped_without,
)

KIND = os.environ.get("TIERED_MEM_TEST_DEVICE", "npu")
if KIND != "npu":
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    # As if it was not installed: without CANN, libraries that look for it would find it and fail.
    sys.modules["torch_npu"] = None  # type: ignore[assignment]
EMULATED = KIND == "npu" and emulated_device.start()
RACES = EMULATED and emulated_device.RACES

# The emulated device must be there before torch is.
import torch  # noqa: E402

from tests.models import eventually, is_empty  # noqa: E402
from tests.service import Service  # noqa: E402
from tests.spilling import Spilling, Training  # noqa: E402
from tiered_mem import TieringManager  # noqa: E402
from tiered_mem.policies import LayerOrderPolicy  # noqa: E402

__all__ = ["Link", "careless", "link", "pytest_runtest_setup"]

needs_npurt = pytest.mark.skipif(
    KIND == "npu" and not hasattr(torch.npu, "npurt"), reason="this torch_npu has no npurt(), which 2.13 has"
)
TESTS = Path(__file__).parent
# What tests may need that a machine with a GPU need not have.
SPARE = ("ascend_emulator", "hypothesis", "rich", "torch_npu")


class MakeManager(Protocol):
    """Makes a manager for all the model's layers, unless told otherwise."""

    def __call__(
        self, num_layers: int | None = None, *, in_flight: int = 0, host_bytes: str = "32MiB"
    ) -> TieringManager: ...


@pytest.fixture
def make_manager(device: str) -> Iterator[MakeManager]:
    """Makes managers, in which nothing may be left at the end of the test."""
    managers: list[TieringManager] = []

    def make(num_layers: int | None = None, *, in_flight: int = 0, host_bytes: str = "32MiB") -> TieringManager:
        policy = LayerOrderPolicy(num_layers, in_flight=in_flight)
        managers.append(TieringManager(policy=policy, device=device, host_bytes=host_bytes))
        return managers[-1]

    yield make
    for manager in managers:
        assert eventually(lambda manager=manager: is_empty(manager)), manager.memory_summary()
        manager.close()


@pytest.fixture
def manager(make_manager: MakeManager) -> TieringManager:
    """A manager in which nothing may be left at the end of the test."""
    return make_manager(1)


@pytest.fixture
def spilling(device: str, tmp_path: Path) -> Iterator[Spilling]:
    """Makes managers with a disk tier, in which nothing may be left at the end of the test."""
    make = Spilling(device, tmp_path)
    yield make
    make.check()


@pytest.fixture
def training(device: str) -> Training:
    """A model, and the gradients that its step must have."""
    return Training(device)


@pytest.fixture
def service(device: str) -> Iterator[Service]:
    """A manager to be told what to do, block by block."""
    service = Service(device)
    yield service
    service.manager.close()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds for each test, which nobody watches: pytest-timeout is not installed")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): as above")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if share := os.environ.get("SLOW_SHARE"):
        number, of = map(int, share.split("/"))
        left_out = {
            item
            for item in items
            if item.get_closest_marker("slow") and zlib.crc32(item.path.name.encode()) % of != number
        }
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """A file whose imports may be missing is skipped: on another device than the NPU, or for lack of a release."""
    spare = NO_RELEASE if KIND == "npu" else (*NO_RELEASE, *SPARE)
    return skipped_without(spare, collector, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """On the CPU, a test that asks torch.cpu for what only devices have, such as their memory, is skipped."""
    try:
        return (yield)
    except AttributeError as error:
        asked = traceback.extract_tb(error.__traceback__)[-1].filename
        if KIND != "cpu" or "module 'torch.cpu' has no" not in str(error) or not Path(asked).is_relative_to(TESTS):
            raise
        pytest.skip(f"only a device has it: {error}")


def pytest_collection_finish() -> None:
    _keep()


@pytest.fixture(autouse=True, scope="module")
def of_a_file() -> Iterator[None]:
    yield
    _keep()


def _keep() -> None:
    # What torch, the test files and what they import have made stays. Out of the collector's sight it costs no test
    # half a second.
    gc.collect()
    gc.freeze()


@pytest.fixture
def device() -> str:
    """The kind of device under test."""
    return KIND


@pytest.fixture
def device_module() -> object:
    """torch.npu or torch.cuda."""
    if KIND == "cpu":
        pytest.skip("the cpu counts no device memory")
    return getattr(torch, KIND)


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Whatever is freed is freed by reference counts alone: a cycle would show as a leak."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
