"""Optimizers that are not torch's: taken as they are, or refused with a word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.optimizer.conftest import MakeTiered
from tests.optimizer.strange_optimizers import (
    Counting,
    Decaying,
    Estimates,
    GlobalNorm,
    Growing,
    MasterWeights,
    Noisy,
    OutOfPlace,
)
from tests.optimizer.training import differences, give_gradients, make_params, outcome, train
from tiered_mem import TieringManager
from tiered_mem.errors import InterruptedStep

pytestmark = pytest.mark.detector_only(why="takes long")

RESIDENCIES = ("host", "disk", "device-until-offload")


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("separable", [None, True])
@pytest.mark.parametrize("kind", [MasterWeights, OutOfPlace, Counting, Growing, Noisy])
def test_it_has_the_same_values(
    kind: Callable[[Sequence[torch.Tensor]], Optimizer],
    separable: bool | None,
    residency: str,
    device: str,
    make_tiered: MakeTiered,
) -> None:
    results = []
    for tier in (False, True):
        params = make_params(device, torch.bfloat16)
        optimizer = kind(params)
        if tier:
            optimizer = make_tiered(optimizer, residency=residency, separable=separable, bucket_bytes=1024)
        torch.manual_seed(0)
        train(optimizer, params, range(12))
        results.append(outcome(optimizer, params))
        kept = optimizer.wrapped if tier else optimizer
        assert getattr(kept, "all_steps", 12) == 12
    assert not differences(*results)


@pytest.mark.parametrize("overlap", [None, "forward"])
def test_a_state_that_is_its_parameter_stays(overlap: Any, device: str, make_tiered: MakeTiered) -> None:
    """A copy of it would not be ordered with what changes the parameter. Its master weight is itself in float32."""
    results = []
    for tier in (False, True):
        halves = make_params(device, torch.bfloat16, [(8,), (9,), (10,)])
        whole = make_params(device, torch.float32, [(64, 64)])
        optimizer: Any = MasterWeights([*halves, *whole])
        if tier:
            optimizer = make_tiered(optimizer, separable=True, bucket_bytes=1024, overlap=overlap)
        train(optimizer, [*halves, *whole], range(6))
        results.append(outcome(optimizer, [*halves, *whole]))
    fields = {
        field.path
        for bucket in optimizer.states.pipeline.buckets
        for field in bucket.fields.get(whole[0], ())
        if whole[0] in bucket.params
    }
    assert fields == {("momentum",)}
    assert not differences(*results)


def test_what_an_optimizer_makes_later_leaves_the_device_too(
    device: str, device_module: Any, make_tiered: MakeTiered
) -> None:
    params = make_params(device)
    tiered = make_tiered(Growing(params))
    train(tiered, params, range(12), missing=False)
    device_module.synchronize()
    held = device_module.memory_allocated()
    tiered.state_dict()
    values = [value for param in params for value in tiered.state[param].values()]
    assert all(value.is_cpu for value in values if isinstance(value, torch.Tensor))
    make_tiered.manager.close()
    assert device_module.memory_allocated() == held


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, GlobalNorm, Estimates])
def test_one_that_needs_all_parameters_at_once_is_found_out(
    kind: Callable[[Sequence[torch.Tensor]], Optimizer], device: str
) -> None:
    params = make_params(device)
    before = [param.detach().clone() for param in params]
    optimizer = kind(params)
    with TieringManager(policy="lru", device=device, host_bytes="16MiB") as manager:
        with pytest.raises(ValueError, match=f"{kind.__name__} .*without separable=True"):
            manager.register_optimizer(optimizer, separable=True)
        assert manager.stats()["host.slots"] == 0
    assert all(torch.equal(*pair) for pair in zip(params, before, strict=True))
    assert not optimizer.state


@pytest.mark.parametrize("early", [False, True])
def test_one_that_changes_states_without_gradients_is_stopped(
    early: bool, device: str, make_tiered: MakeTiered
) -> None:
    """Whether or not the states came along with others: they are not taken back."""
    params = make_params(device)
    tiered = make_tiered(Decaying(params), separable=True)
    train(tiered, params, range(1), missing=False)
    give_gradients(params, 1, missing=True)
    assert any(param.grad is None for param in params)
    if early:
        first = tiered.states.pipeline.buckets[0]
        tiered.states.pipeline.bring([(first, set(first.params))])
    with pytest.raises(InterruptedStep) as caught:
        tiered.step()
    assert "the state of a parameter without gradient" in str(caught.value.__cause__)


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_options_that_tie_states_to_the_device_are_refused(option: str, device: str) -> None:
    optimizer = torch.optim.Adam(make_params(device), **{option: True})
    manager = TieringManager(policy="lru", device=device, host_bytes="16MiB")
    with manager, pytest.raises(ValueError, match=f"{option}=True cannot be tiered"):
        manager.register_optimizer(optimizer)


def test_an_optimizer_is_registered_once(device: str, make_tiered: MakeTiered) -> None:
    optimizer = torch.optim.AdamW(make_params(device))
    tiered = make_tiered(optimizer)
    for again in (optimizer, tiered):
        with pytest.raises(ValueError, match="registered already"):
            make_tiered.manager.register_optimizer(again)


def test_what_is_no_optimizer_is_refused(device: str, make_tiered: MakeTiered) -> None:
    with pytest.raises(TypeError, match=r"a torch\.optim\.Optimizer is needed, and this is a list"):
        make_tiered([])  # type: ignore[arg-type]


def test_residencies_have_names(device: str, make_tiered: MakeTiered) -> None:
    there_are = "'host', 'disk', 'auto', 'device-until-offload'"
    with pytest.raises(ValueError, match=f"residency is 'moon'; there are {there_are}"):
        make_tiered(torch.optim.AdamW(make_params(device)), residency="moon")


def test_the_trial_draws_no_random_numbers(device: str, make_tiered: MakeTiered) -> None:
    torch.manual_seed(1)
    expected = torch.rand(4), torch.rand(4, device=device).cpu()
    torch.manual_seed(1)
    make_tiered(Noisy(make_params(device)))
    assert torch.equal(torch.rand(4), expected[0])
    assert torch.equal(torch.rand(4, device=device).cpu(), expected[1])
