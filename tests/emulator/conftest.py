"""These tests are about the emulator itself; with a real device under test they are left out."""

import logging
from collections.abc import Iterator

import pytest

from tests.conftest import EMULATED
from tests.emulator.acl import Acl

if not EMULATED:
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
