"""These tests are about the emulator itself; with a real device under test they are left out."""

import logging
import os
from collections.abc import Iterator

import pytest
from ascend_emulator.hardware import real_cann

from tests.emulator.acl import Acl

if os.environ.get("TIERED_MEM_TEST_DEVICE", "npu") != "npu" or real_cann() is not None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def acl() -> Acl:
    return Acl()


@pytest.fixture
def native_only(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails a test in which an operator went to the CPU fallback, even one that another operator called."""
    with caplog.at_level(logging.DEBUG, logger="ascend_emulator.fallback"):
        yield
    assert [record.getMessage() for record in caplog.get_records("call")] == []
