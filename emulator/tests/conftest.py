"""The emulator's own tests, which need no other package of this repository; a real device leaves them out."""

import logging
from collections.abc import Iterator

import pytest

from emulator.tests import emulated_device
from emulator.tests.acl import Acl
from emulator.tests.emulated_device import careless, link, pytest_make_collect_report, pytest_runtest_setup

__all__ = ["careless", "link", "pytest_make_collect_report", "pytest_runtest_setup"]

if not emulated_device.start():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> str:
    return "npu"


@pytest.fixture
def acl() -> Acl:
    """The runtime, with all done that earlier tests left in torch_npu's queue and in their streams."""
    import torch

    torch.npu.synchronize()
    return Acl()


@pytest.fixture
def native_only(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails a test in which an operator went to the CPU fallback, even one that another operator called."""
    with caplog.at_level(logging.DEBUG, logger="ascend_emulator.fallback"):
        yield
    assert [record.getMessage() for record in caplog.get_records("call")] == []
