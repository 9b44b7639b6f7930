"""Parameters and states are those of the optimizer that is not tiered, bit by bit."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.optimizer.conftest import MakeTiered
from tests.optimizer.training import OPTIMIZERS, Outcome, differences, give_gradients, make_params, outcome, train

pytestmark = pytest.mark.detector_only(why="takes long")

RESIDENCIES = ("host", "disk", "device-until-offload")


@functools.cache
def plain(name: str, dtype: torch.dtype, device: str) -> Outcome:
    """Of 20 steps without tiering."""
    params = make_params(device, dtype)
    optimizer = OPTIMIZERS[name](params)
    train(optimizer, params, range(20))
    return outcome(optimizer, params)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow(why="all of it in another dtype"))],
    ids=str,
)
@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps(name: str, residency: str, dtype: torch.dtype, device: str, make_tiered: MakeTiered) -> None:
    """With changing learning rates, and gradients that are missing now and then."""
    params = make_params(device, dtype)
    tiered = make_tiered(OPTIMIZERS[name](params), residency=residency)
    for begin in range(0, 20, 5):
        train(tiered, params, range(begin, begin + 2))
        make_tiered.manager.offload(tiered)
        train(tiered, params, range(begin + 2, begin + 4))
        make_tiered.manager.reload(tiered)
        train(tiered, params, range(begin + 4, begin + 5))
    assert not differences(plain(name, dtype, device), outcome(tiered, params))


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "adafactor"])
def test_an_optimizer_that_has_made_steps_before_is_taken_over(
    name: str, residency: str, device: str, make_tiered: MakeTiered
) -> None:
    params = make_params(device)
    optimizer = OPTIMIZERS[name](params)
    train(optimizer, params, range(7))
    states = optimizer.state
    tiered = make_tiered(optimizer, residency=residency)
    assert optimizer.state is not states, "they are the tiered one's"
    assert not states
    train(tiered, params, range(7, 20))
    assert not differences(plain(name, torch.float32, device), outcome(tiered, params))


@pytest.mark.parametrize("bucket_bytes", [1, 1024, 4096, 1 << 20])
def test_it_is_the_same_with_buckets_of_any_size(bucket_bytes: int, device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    tiered = make_tiered(OPTIMIZERS["adamw"](params), bucket_bytes=bucket_bytes)
    train(tiered, params, range(20))
    assert not differences(plain("adamw", torch.float32, device), outcome(tiered, params))


@pytest.mark.parametrize("fused", [False, True])
def test_fused_sgd_with_all_gradients(fused: bool, device: str, make_tiered: MakeTiered) -> None:
    """It does not take momenta of which some are there and others are not."""
    results = []
    for tier in (False, True):
        params = make_params(device)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=fused)
        if tier:
            optimizer = make_tiered(optimizer)
        train(optimizer, params, range(20), missing=False)
        results.append(outcome(optimizer, params))
    assert not differences(*results)


def test_foreach_sgd_where_some_parameters_begin_later(device: str, make_tiered: MakeTiered) -> None:
    """Torch then multiplies their momenta one by one, which rounds otherwise in bfloat16."""
    results = []
    for tier in (False, True):
        params = make_params(device, torch.bfloat16)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True)
        if tier:
            optimizer = make_tiered(optimizer, bucket_bytes=1)
        for step in range(6):
            give_gradients(params, step, missing=False)
            if step < 4:
                params[step].grad = None
            optimizer.step()
        results.append(outcome(optimizer, params))
    assert not differences(*results)


def test_a_model_that_is_trained_with_its_activations_offloaded_too(device: str, make_tiered: MakeTiered) -> None:
    """Backward and the first copies for the step run side by side."""
    results = []
    for tier in (False, True):
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, device=device) for _ in range(6))
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
        if tier:
            optimizer = make_tiered(optimizer, bucket_bytes=64 << 10)
            context = make_tiered.manager.offload_context(layers, min_bytes=1)
        for step in range(8):
            for microbatch in range(2):
                x = torch.full((512, 64), 0.1 * (step + microbatch + 1), device=device)
                if tier:
                    with context:
                        for layer in layers:
                            x = layer(x).sin()
                        loss = x.square().mean()
                else:
                    for layer in layers:
                        x = layer(x).sin()
                    loss = x.square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(outcome(optimizer, list(layers.parameters())))
    assert not differences(*results)
