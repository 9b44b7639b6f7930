"""Twenty steps by backward, in which the optimizer's states leave and return, beside those of a plain optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.optimizer.conftest import MakeTiered
from tests.optimizer.training import (
    OPTIMIZERS,
    RESIDENCIES,
    Outcome,
    differences,
    make_params,
    outcome,
    train_by_backward,
)

SMALL = 512  # bytes of a bucket, so that there are several


def _never(step: int, index: int) -> bool:
    return False


def _now_and_then(step: int, index: int) -> bool:
    return (step + index) % 4 == 0


# Which gradients are missing in which steps.
MISSING: dict[str, Callable[[int, int], bool]] = {"all": _never, "some missing": _now_and_then}


def cases() -> list[Any]:
    """Each optimizer with each residency, with and without gradients that are missing; all but two of them slow."""
    slow = pytest.mark.slow(why="takes long; each optimizer has two residencies without it")
    found = []
    for number, name in enumerate(OPTIMIZERS):
        for place, residency in enumerate(RESIDENCIES):
            for lack, missing in enumerate(MISSING):
                often = (number + place + lack) % len(RESIDENCIES) == 0
                found.append(pytest.param(name, residency, missing, marks=[] if often else slow))
    return found


def check_twenty_steps(
    name: str, residency: str, missing: str, device: str, make_tiered: MakeTiered, overlap: str
) -> None:
    """The learning rate changes before each backward: between step() and the next forward, too."""
    params = make_params(device)
    tiered = make_tiered(OPTIMIZERS[name](params), residency=residency, bucket_bytes=SMALL, overlap=overlap)
    for begin in range(0, 20, 5):
        train_by_backward(tiered, params, range(begin, begin + 3), missing=MISSING[missing])
        make_tiered.manager.offload(tiered)
        train_by_backward(tiered, params, range(begin + 3, begin + 5), missing=MISSING[missing])
        make_tiered.manager.reload(tiered)
    assert not differences(_plain(name, device, missing), outcome(tiered, params))


@functools.cache
def _plain(name: str, device: str, missing: str) -> Outcome:
    params = make_params(device)
    optimizer = OPTIMIZERS[name](params)
    train_by_backward(optimizer, params, range(20), missing=MISSING[missing])
    return outcome(optimizer, params)
