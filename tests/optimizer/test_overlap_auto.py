"""overlap="auto": in backward where the first step shows nothing against it, and else beside the next forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.optimizer.conftest import MakeTiered
from tests.optimizer.training import OPTIMIZERS, Params, backward, differences, make_params, outcome

Step = Callable[[Any, Params, int, Any], None]


def _plainly(optimizer: Any, params: Params, step: int, scaler: Any) -> None:
    backward(params, step)
    optimizer.step()


def _clipped(optimizer: Any, params: Params, step: int, scaler: Any) -> None:
    backward(params, step)
    torch.nn.utils.clip_grad_norm_(params, 0.5)
    optimizer.step()


def _loss(params: Params, step: int) -> Any:
    return sum((param * (step + 1)).sin().sum() for param in params)


def _scaled(optimizer: Any, params: Params, step: int, scaler: Any) -> None:
    scaler.scale(_loss(params, step)).backward()
    scaler.step(optimizer)
    scaler.update()


def _unscaled(optimizer: Any, params: Params, step: int, scaler: Any) -> None:
    scaler.scale(_loss(params, step)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(params, 0.5)
    scaler.step(optimizer)
    scaler.update()


def _accumulated(optimizer: Any, params: Params, step: int, scaler: Any) -> None:
    backward(params, 10 + step)
    backward(params, 20 + step)
    optimizer.step()


def _announced(optimizer: Any, params: Params, step: int, scaler: Any) -> None:
    backward(params, 10 + step)
    getattr(optimizer, "last_backward", int)()
    backward(params, 20 + step)
    optimizer.step()


WAYS: dict[str, tuple[Step, str]] = {
    "plainly": (_plainly, "backward"),
    "announced": (_announced, "backward"),
    "clipped": (_clipped, "forward"),
    "scaled": (_scaled, "forward"),
    "unscaled": (_unscaled, "forward"),
    "accumulated": (_accumulated, "forward"),
}


@pytest.mark.parametrize("residency", ["host", "disk"])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_train(way: str, residency: str, device: str, make_tiered: MakeTiered) -> None:
    step, overlap = WAYS[way]
    outcomes = []
    for tier in (False, True):
        params = make_params(device)
        optimizer: Any = torch.optim.AdamW(params, lr=0.1)
        if tier:
            optimizer = make_tiered(optimizer, residency=residency, bucket_bytes=512, overlap="auto")
        scaler = torch.amp.GradScaler(device, init_scale=16.0)
        for number in range(6):
            step(optimizer, params, number, scaler)
            optimizer.zero_grad()
        outcomes.append(outcome(optimizer, params))
    assert optimizer.overlap == overlap
    assert not differences(*outcomes)


def test_what_is_stepped_at_once_has_none(device: str, make_tiered: MakeTiered) -> None:
    tiered = make_tiered(torch.optim.LBFGS(make_params(device)), overlap="auto")
    assert tiered.overlap is None


def test_the_log_says_why(device: str, make_tiered: MakeTiered, caplog: pytest.LogCaptureFixture) -> None:
    params = make_params(device)
    tiered = make_tiered(OPTIMIZERS["adamw"](params), overlap="auto")
    with caplog.at_level("INFO", "tiered_mem"):
        _clipped(tiered, params, 0, None)
    assert "AdamW has overlap='forward': 5 of 5 gradients were changed" in caplog.text
