"""The emulated device under test, started before torch is imported, and what a test may change about it.

A conftest starts it, and imports the fixtures and the hook from here.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any, Protocol

import pytest

# Whoever runs the tests may choose another schedule, and the race detector.
SCHEDULE = os.environ.get("ASCEND_EMULATOR_SCHEDULE", "eager")
RACES = os.environ.get("ASCEND_EMULATOR_RACES") == "1"
# The releases that the tests use want a newer Python than 3.10.
NO_RELEASE = ("diffusers", "transformers") if sys.version_info < (3, 11) else ()


def start() -> bool:
    """Starts the device unless it runs; whether it runs then.

    Not on a machine with a real one, nor where torch was imported without it: other tests have chosen a device.
    """
    if "torch" not in sys.modules:
        import ascend_emulator
        from ascend_emulator.hardware import real_cann

        if not runs() and real_cann() is None:
            ascend_emulator.start(hbm_bytes="4GiB")
    return runs()


def runs() -> bool:
    """Whether this process has an emulated device."""
    if importlib.util.find_spec("ascend_emulator") is None:
        return False
    from ascend_emulator.runtime import is_running

    return is_running()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leaves out what means nothing in this schedule."""
    for marker in item.iter_markers("schedules"):
        if SCHEDULE not in marker.args and runs():
            pytest.skip(f"not in the {SCHEDULE} schedule: {marker.kwargs['why']}")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """A file is skipped that imports what has no release for this Python."""
    return skipped_without(NO_RELEASE, collector, (yield))


def skipped_without(names: tuple[str, ...], collector: pytest.Collector, report: Any) -> Any:
    """The report of a file, which is skipped where its imports miss one of these."""
    error = report.call.excinfo.value.__cause__ if report.failed and report.call.excinfo else None
    if isinstance(error, ModuleNotFoundError) and error.name in names:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 1, f"Skipped: {error.name} is not installed here")
    return report


class Link(Protocol):
    """Sets the bandwidth of the emulated host link, in both directions or in one: link("100MB/s", h2d="1GB/s")."""

    def __call__(self, rate: str = "0", *, h2d: str | None = None, d2h: str | None = None) -> None: ...


@pytest.fixture
def link() -> Iterator[Link]:
    """A link whose speed the test can set. Afterwards it has no limit, as before."""
    if not runs():
        pytest.skip("only the emulated device has a link whose speed can be set")
    import ascend_emulator
    import torch

    def set_rate(rate: str = "0", *, h2d: str | None = None, d2h: str | None = None) -> None:
        ascend_emulator.configure(h2d_bytes_per_s=h2d or rate, d2h_bytes_per_s=d2h or rate)

    yield set_rate
    torch.npu.synchronize()
    set_rate()


@pytest.fixture
def careless() -> Iterator[None]:
    """The test does on purpose what the race detector is there for."""
    yield
    if RACES and runs():
        import ascend_emulator

        ascend_emulator.clear_races()
