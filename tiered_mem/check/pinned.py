"""Host memory that torch takes for pinned."""

from __future__ import annotations

from ..allocators.base import OutOfHostMemory
from ..errors import PinningFailed
from ..tiers.host_tier import bytes_of, is_pinned
from ..tiers.pinning import chosen_pool, tried_sources
from .bench import Bench
from .outcome import Check, Outcome, failed, passed

PINNED = "pinned memory"
_BYTES = 2 << 20


def pinned() -> list[Check]:
    return [Check(PINNED, _pinned, (), "a cpu copies from any memory")]


def _pinned(bench: Bench) -> Outcome:
    found = {name: _what(bench, name) for name in tried_sources(bench.device.kind)}
    told = "; ".join(f"{name}: {what or 'pinned'}" for name, what in found.items())
    try:
        chosen, pool = chosen_pool(bench.device, _BYTES, True, preallocate=False)
    except PinningFailed:
        return failed(f"torch takes no host memory for pinned, and would wait at each copy: {told}")
    pool.close()
    figures = {name: (float(not what), "") for name, what in found.items()}
    return passed(f"pin=True is {chosen!r} ({told})", **figures)


def _what(bench: Bench, name: str) -> str:
    """What is wrong with a source; "" if torch takes its memory for pinned."""
    try:
        _, pool = chosen_pool(bench.device, _BYTES, name, preallocate=True)
    except PinningFailed as error:
        return _shortest(error.__cause__ or error)
    with pool:
        try:
            region = pool.allocate(_BYTES)
        except (OSError, RuntimeError, OutOfHostMemory) as error:
            return _shortest(error)
        recognised = is_pinned(bytes_of(pool.slab(region)))
        pool.deallocate(region)
    return "" if recognised else "not recognised"


def _shortest(error: BaseException) -> str:
    """Without the advice, which is about a training."""
    return str(error).splitlines()[0].partition(". Lower host_bytes")[0]
