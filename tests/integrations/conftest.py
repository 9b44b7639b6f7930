"""What integrations are tested with that take the default manager, which a process has one of."""

from __future__ import annotations

import pytest

import tiered_mem
from tests.conftest import KIND
from tiered_mem import TieringManager


@pytest.fixture(scope="session")
def default() -> TieringManager:
    """The default manager, for all layers."""
    tiered_mem.configure(device=KIND, policy="layer-order", host_bytes="256MiB")
    return tiered_mem.default_manager()
