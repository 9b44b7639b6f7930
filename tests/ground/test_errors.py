from __future__ import annotations

import pytest

from tiered_mem import errors

pytestmark = pytest.mark.once(why="it needs no device")


def test_a_full_tier_says_the_numbers_and_carries_them() -> None:
    full = errors.TierFull(
        "host", needed=3 << 20, free=1 << 20, used=7 << 20, limit=8 << 20, advice="raise host_bytes"
    )
    assert str(full) == "host tier: needed 3.0 MiB, free 1.0 MiB, used 7.0 MiB, limit 8.0 MiB; raise host_bytes"
    assert (full.needed, full.free, full.used, full.limit) == (3 << 20, 1 << 20, 7 << 20, 8 << 20)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.DeviceUnavailable, RuntimeError),
        (errors.DeviceFailed, RuntimeError),
        (errors.PinningFailed, RuntimeError),
        (errors.InterruptedStep, RuntimeError),
        (errors.Offloaded, RuntimeError),
        (errors.OffloadRefused, RuntimeError),
        (errors.Reentered, RuntimeError),
        (errors.TierFull, MemoryError),
        (errors.SpillDirRefused, OSError),
        (errors.CorruptRecord, OSError),
        (errors.ChangedTensor, RuntimeError),
        (errors.PolicyError, RuntimeError),
        (errors.Closed, RuntimeError),
    ],
)
def test_errors_can_be_caught_by_family(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, errors.TieredMemError)
    assert issubclass(error, builtin)
