"""Steps with odd groups, parameters and gradients come out as the optimizer's own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.conftest import KIND
from tests.optimizer.conftest import MakeTiered
from tests.optimizer.strange_optimizers import Clipped, Langevin
from tests.optimizer.training import (
    RESIDENCIES,
    differences,
    give_gradients,
    make_params,
    outcome,
    train,
)
from tiered_mem import TieringManager


def test_the_defaults_are_left_alone(device: str, make_tiered: MakeTiered) -> None:
    """A group that is added later has the options that it has without tiering."""
    groups = []
    for tier in (False, True):
        params = make_params(device)
        optimizer: Optimizer = torch.optim.Adafactor(params[:2])
        names = set(optimizer.defaults)
        if tier:
            optimizer = make_tiered(optimizer)
            assert set(optimizer.wrapped.defaults) == names  # type: ignore[attr-defined]
        optimizer.add_param_group({"params": params[2:]})
        groups.append([set(group) for group in optimizer.param_groups])
    assert groups[0] == groups[1]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # by torch, of its own deepcopy
def test_a_learning_rate_that_groups_share(device: str, make_tiered: MakeTiered) -> None:
    """It is one tensor in a state_dict, and after loading that: a change of it is one of all groups."""
    results = []
    for tier in (False, True):
        params = make_params(device)
        rate = torch.tensor(0.1)
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        optimizer: Optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9, foreach=False)
        if tier:
            optimizer = make_tiered(optimizer)
        give_gradients(params, 0)
        optimizer.step()
        saved = optimizer.state_dict()
        assert saved["param_groups"][0]["lr"] is saved["param_groups"][1]["lr"]
        optimizer.load_state_dict(saved)
        one, other = (group["lr"] for group in optimizer.param_groups)
        assert one is other
        one.mul_(0.5)
        give_gradients(params, 1)
        optimizer.step()
        results.append(outcome(optimizer, params))
    assert not differences(*results)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("separable", [None, True, False])
def test_sparse_adam_with_several_parameters(separable: bool | None) -> None:
    """On the cpu, as torch_npu has no sparse tensors."""
    results = []
    for tier in (False, True):
        torch.manual_seed(0)
        tables = [torch.nn.Embedding(20, 4, sparse=True) for _ in range(3)]
        params = [table.weight for table in tables]
        optimizer: Optimizer = torch.optim.SparseAdam(params)
        with TieringManager(policy="lru", device="cpu", host_bytes="16MiB") as manager:
            if tier:
                optimizer = manager.register_optimizer(optimizer, bucket_bytes=1, separable=separable)
            for step in range(5):
                for table in tables:
                    table(torch.tensor([step, 3, 7])).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(outcome(optimizer, params))
    assert not differences(*results)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("sparse_first", [False, True])
@pytest.mark.parametrize("separable", [None, True])
def test_a_step_that_is_refused_changes_nothing(separable: bool | None, sparse_first: bool) -> None:
    """As in torch: the optimizer can be used afterwards, and saved."""
    kind = torch.optim.AdamW if separable is None else Clipped.__base__
    results = []
    for tier in (False, True):
        torch.manual_seed(0)
        table, linear = torch.nn.Embedding(20, 4, sparse=True), torch.nn.Linear(4, 4)
        modules = [table, linear] if sparse_first else [linear, table]
        params = [param for module in modules for param in module.parameters()]
        optimizer: Optimizer = kind(params)  # type: ignore[misc]
        with TieringManager(policy="lru", device="cpu", host_bytes="16MiB") as manager:
            if tier:
                optimizer = manager.register_optimizer(optimizer, bucket_bytes=1, separable=separable)
            give_gradients(params, 0, missing=False)
            optimizer.step()
            saved = [param.detach().clone() for param in params]
            linear(table(torch.tensor([1, 2]))).sum().backward()
            table.weight.grad = torch.ones_like(table.weight).to_sparse(1)
            with pytest.raises(RuntimeError, match="does not support sparse gradients, please consider SparseAdam"):
                optimizer.step()
            assert all(torch.equal(*pair) for pair in zip(params, saved, strict=True))
            optimizer.load_state_dict(optimizer.state_dict())
            give_gradients(params, 1, missing=False)
            optimizer.step()
            results.append(outcome(optimizer, params))
    assert not differences(*results)


@pytest.mark.parametrize(("separable", "own"), [(None, False), (True, True), (True, False)])
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_random_numbers_are_drawn_in_the_same_order(
    residency: str, separable: bool | None, own: bool, device: str, make_tiered: MakeTiered
) -> None:
    """However parameters lie in buckets: with groups, frozen ones, ones without state, and ones that come later."""
    results = []
    for tier in (False, True):
        params = make_params(
            device, shapes=[(9, 9), (7,), (30, 30), (3, 3), (5,), (20, 20), (2, 2), (31, 31), (4, 4)]
        )
        params[3].requires_grad_(False)
        generator = torch.Generator().manual_seed(7) if own else None
        groups = [{"params": params[:4]}, {"params": params[4:7]}]
        optimizer: Any = Langevin(groups, generator=generator)  # type: ignore[arg-type]
        if tier:
            optimizer = make_tiered(optimizer, residency=residency, separable=separable, bucket_bytes=4096)
        torch.manual_seed(3)
        for step in range(8):
            give_gradients(params, step)
            if step == 3:
                optimizer.add_param_group({"params": params[7:8]})
            if step == 5:
                optimizer.param_groups[0]["params"].append(params[8])
            if step == 6:
                params[3].requires_grad_(True)
            if step < 6:
                params[3].grad = None
            optimizer.step()
        results.append((outcome(optimizer, params), torch.rand(1)))
    assert not differences(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_a_parameter_that_is_there_twice(device: str, make_tiered: MakeTiered) -> None:
    """Torch warns of it, and steps it twice."""
    results = []
    for tier in (False, True):
        params = make_params(device)
        optimizer: Any = torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False)
        if tier:
            optimizer = make_tiered(optimizer, bucket_bytes=1)
        optimizer.param_groups[0]["params"].append(params[1])
        train(optimizer, params, range(4), missing=False)
        results.append([param.detach().cpu() for param in params])
    assert all(map(torch.equal, *results))


def test_a_schedulers_step_is_known_and_anybody_elses_is_not(device: str, make_tiered: MakeTiered) -> None:
    for own in (False, True):
        optimizer = torch.optim.AdamW(make_params(device))
        if own:
            optimizer.step = functools.partial(torch.optim.AdamW.step, optimizer)  # type: ignore[method-assign]
        else:
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
        assert make_tiered(optimizer).at_once is own


def test_adafactor_takes_an_epsilon_of_the_first_parameter(device: str, make_tiered: MakeTiered) -> None:
    """With parameters of several types in a group, torch's own is not as with each of them alone."""
    results = []
    for tier in (False, True):
        params = [*make_params(device, torch.bfloat16)[:2], *make_params(device)[2:]]
        optimizer: Any = torch.optim.Adafactor(params)
        if tier:
            optimizer = make_tiered(optimizer, bucket_bytes=1)
            assert optimizer.at_once
        for step in range(4):
            give_gradients(params, step, missing=False)
            for param in params:
                param.grad.mul_(1e-7)
            optimizer.step()
        results.append(outcome(optimizer, params))
    assert not differences(*results)
    assert not make_tiered(torch.optim.Adafactor(make_params(device))).at_once


@pytest.mark.skipif(KIND == "cpu", reason="there are no two devices")
@pytest.mark.parametrize("later", [False, True])
def test_a_group_with_parameters_on_two_devices(later: bool, device: str, make_tiered: MakeTiered) -> None:
    """For all of a group together torch chooses whether to step them with its kernels for lists."""
    for foreach in (None, True):
        params = [*make_params(device)[:3], *make_params("cpu")[3:]]
        groups = [{"params": params[:3] if later else params}]
        tiered = make_tiered(torch.optim.NAdam(groups, foreach=foreach), bucket_bytes=1)
        assert tiered.at_once is (foreach is None and not later)
        if later:
            tiered.param_groups[0]["params"].extend(params[3:])
        train(tiered, params, range(3))
        expected = [*make_params(device)[:3], *make_params("cpu")[3:]]
        plain = torch.optim.NAdam(expected, foreach=foreach)
        train(plain, expected, range(3))
        assert not differences(outcome(plain, expected), outcome(tiered, params))
