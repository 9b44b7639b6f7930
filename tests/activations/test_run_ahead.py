"""How far the host may be ahead of the device."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import Link
from tests.models import Stack, eventually, is_empty, stack
from tiered_mem import OffloadContext, TieringManager
from tiered_mem.policies import LayerOrderPolicy


def train(model: Stack, x: torch.Tensor, offload: OffloadContext, steps: int) -> None:
    """Steps that never wait for the device."""
    for _ in range(steps):
        with offload:
            loss = model(x)
        loss.backward()
        model.zero_grad()


def peak(manager: TieringManager) -> int:
    return int(manager.stats()["host.used.peak"])


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("preallocate", [False, True])
def test_the_host_takes_memory_for_so_many_steps(device: str, link: Link, limit: int, preallocate: bool) -> None:
    model, x = stack(2, device)
    with TieringManager(
        policy=LayerOrderPolicy(),
        device=device,
        host_bytes="256MiB",
        preallocate=preallocate,
        steps_in_flight=limit,
    ) as manager:
        offload = manager.offload_context(model.layers, min_bytes=1)
        train(model, x, offload, 1)
        assert eventually(lambda: is_empty(manager))
        one = peak(manager)
        link(h2d="50MB/s")  # a step's reloads take a tenth of a second and more
        train(model, x, offload, 3 * limit)
        assert peak(manager) <= limit * one
        link()
        assert eventually(lambda: is_empty(manager))


def test_a_step_in_which_nothing_is_under_way_does_not_wait(device: str) -> None:
    model, x = stack(2, device)
    with TieringManager(policy=LayerOrderPolicy(), device=device, host_bytes="64MiB") as manager:
        offload = manager.offload_context(model.layers, min_bytes=1)
        for _ in range(4):
            train(model, x, offload, 1)
            manager.synchronize()
        assert manager.stats()["host.step_waits.total"] == 0


@pytest.mark.parametrize("limit", [0, -1, 1.5, "2", None])
def test_the_limit_is_a_number_of_steps(device: str, limit: object) -> None:
    with pytest.raises((TypeError, ValueError), match="steps_in_flight"):
        TieringManager(policy="lru", device=device, steps_in_flight=limit)  # type: ignore[arg-type]
