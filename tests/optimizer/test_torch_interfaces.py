"""What users do with an optimizer of torch, they do with a tiered one."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.optimizer.conftest import MakeTiered
from tests.optimizer.training import differences, give_gradients, make_params, outcome, train
from tiered_mem import TieringManager


@pytest.fixture(params=[False, True], ids=["plain", "tiered"])
def tier(request: pytest.FixtureRequest) -> bool:
    """Both are tested: a test that is wrong about torch fails for the plain one."""
    return bool(request.param)


@pytest.fixture
def maybe(tier: bool, make_tiered: MakeTiered) -> Any:
    return make_tiered if tier else lambda optimizer: optimizer


def test_schedulers(device: str, make_tiered: MakeTiered) -> None:
    """Made for the tiered one, or for the other before it is tiered."""
    results = []
    for when in ("plain", "before", "after"):
        params = make_params(device)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, lr=1e-2)
        if when == "after":
            optimizer = make_tiered(optimizer)
        schedulers = [
            LambdaLR(optimizer, lambda epoch: 0.9**epoch),
            OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
        ]
        plateau = ReduceLROnPlateau(optimizer, patience=1)
        if when == "before":
            optimizer = make_tiered(optimizer)
        for step in range(8):
            give_gradients(params, step)
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            plateau.step(1.0)
        results.append(outcome(optimizer, params))
    assert not differences(results[0], results[1])
    assert not differences(results[0], results[2])


def test_hooks_are_called_once_for_a_step(tier: bool, maybe: Any, device: str) -> None:
    params = make_params(device)
    plain = torch.optim.AdamW(params)
    calls: list[tuple[str, torch.optim.Optimizer]] = []
    plain.register_step_pre_hook(lambda optimizer, *_: calls.append(("before, early", optimizer)))
    optimizer = maybe(plain)
    optimizer.register_step_post_hook(lambda optimizer, *_: calls.append(("after", optimizer)))
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: calls.append(("before, all", optimizer))),
        register_optimizer_step_post_hook(lambda optimizer, *_: calls.append(("after, all", optimizer))),
    ]
    try:
        train(optimizer, params, [0])
    finally:
        for handle in handles:
            handle.remove()
    names = [name for name, _ in calls]
    assert names == ["before, all", "before, early", "after", "after, all"]
    assert all(of is optimizer for _, of in calls)


def test_a_closure_is_called_once_with_gradients(tier: bool, maybe: Any, device: str) -> None:
    params = make_params(device)
    optimizer = maybe(torch.optim.AdamW(params))
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        loss = sum((param.square().sum() for param in params), torch.zeros((), device=device))
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss is not None
    assert loss.item() > 0


@pytest.mark.parametrize("found_inf", [False, True])
def test_a_gradient_scaler(found_inf: bool, device: str, make_tiered: MakeTiered) -> None:
    results = []
    for tiered in (False, True):
        params = make_params(device)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, lr=1e-2)
        if tiered:
            optimizer = make_tiered(optimizer)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0)
        for step in range(4):
            loss = sum(((step + 1) * param.square().sum() for param in params), torch.zeros((), device=device))
            scaler.scale(loss).backward()
            if found_inf and step == 2:
                params[0].grad.view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append(outcome(optimizer, params))
        assert scaler.get_scale() == (512.0 if found_inf else 1024.0)
    assert not differences(*results)


def test_groups_that_are_added_later(device: str, make_tiered: MakeTiered) -> None:
    results = []
    for tiered in (False, True):
        params = make_params(device)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(params[:2])
        if tiered:
            optimizer = make_tiered(optimizer)
        train(optimizer, params, range(3), missing=False)
        optimizer.add_param_group({"params": params[2:], "lr": 0.3, "weight_decay": 0.5})
        train(optimizer, params, range(3, 8))
        results.append(outcome(optimizer, params))
    assert not differences(*results)


def test_parameters_that_come_and_go(device: str, make_tiered: MakeTiered) -> None:
    """Frozen and thawed, put into a group's list behind its back, and taken out of it."""
    results = []
    for tiered in (False, True):
        params = make_params(device)
        params[1].requires_grad_(False)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(params[:4])
        if tiered:
            optimizer = make_tiered(optimizer)
        for step in range(9):
            give_gradients(params, step, missing=False)
            if step == 3:
                params[1].requires_grad_()
            if not params[1].requires_grad:
                params[1].grad = None
            if step == 5:
                optimizer.param_groups[0]["params"].append(params[4])
            if step == 7:
                optimizer.param_groups[0]["params"].pop(0)
            optimizer.step()
        results.append([param.detach().cpu() for param in params])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_the_parameter_whose_gradient_is_waited_for_is_frozen(device: str, make_tiered: MakeTiered) -> None:
    """It is the one from which is known that backward ends."""
    results = []
    for tiered in (False, True):
        params = make_params(device)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(params)
        if tiered:
            optimizer = make_tiered(optimizer)
        for step in range(6):
            if step == 2:
                for param in params[1:]:
                    param.requires_grad_(False)
            optimizer.zero_grad()
            sum((param.square().sum() for param in params), torch.zeros((), device=device)).backward()
            optimizer.step()
            if step == 3:
                params[0].requires_grad_(False)
                params[1].requires_grad_(True)
        results.append(outcome(optimizer, params))
    assert not differences(*results)


def test_tied_parameters_and_empty_ones(device: str, make_tiered: MakeTiered) -> None:
    results = []
    for tiered in (False, True):
        shared, empty = make_params(device, shapes=[(8, 6), (0, 5)])
        tied = torch.nn.Linear(6, 8, bias=False, device=device)
        tied.weight = shared
        params = [shared, empty]
        assert tied.weight is shared
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(params)
        if tiered:
            optimizer = make_tiered(optimizer)
        train(optimizer, params, range(6), missing=False)
        results.append(outcome(optimizer, params))
    assert not differences(*results)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.Adagrad])
def test_sparse_gradients(kind: Any) -> None:
    """On the cpu, as torch_npu has no sparse tensors."""
    results = []
    for tiered in (False, True):
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(20, 4, sparse=True)
        optimizer: torch.optim.Optimizer = kind(embedding.parameters())
        manager = TieringManager(policy="lru", device="cpu", host_bytes="16MiB")
        if tiered:
            optimizer = manager.register_optimizer(optimizer)
        for step in range(5):
            embedding(torch.tensor([step, 3, 7])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(outcome(optimizer, list(embedding.parameters())))
        manager.close()
    assert not differences(*results)


def test_it_is_an_optimizer_with_the_same_groups(device: str, make_tiered: MakeTiered) -> None:
    optimizer = torch.optim.AdamW(make_params(device), lr=0.25)
    tiered = make_tiered(optimizer)
    assert isinstance(tiered, torch.optim.Optimizer)
    assert tiered.param_groups is optimizer.param_groups
    assert tiered.defaults["lr"] == 0.25
    assert tiered.wrapped is optimizer
    assert repr(tiered) == f"Tiered{optimizer!r}"
    with pytest.raises(AttributeError):
        _ = tiered.no_such_thing


def test_nothing_is_left_of_one_that_is_forgotten(device: str, make_tiered: MakeTiered, no_gc: None) -> None:
    params = make_params(device)
    tiered = make_tiered(torch.optim.AdamW(params))
    train(tiered, params, range(2))
    manager = make_tiered.manager
    assert manager.stats()["host.used.current"] > 0
    del tiered
    manager.synchronize()
    assert manager.stats()["host.used.current"] == 0


def test_a_manager_that_is_forgotten_with_its_optimizer_leaves_nothing(device: str, no_gc: None) -> None:
    params = make_params(device)
    manager = TieringManager(policy="lru", device=device, host_bytes="16MiB")
    tiered = manager.register_optimizer(torch.optim.AdamW(params))
    train(tiered, params, range(2))
    gone = weakref.ref(manager)
    del manager
    train(tiered, params, range(2, 4))
    assert gone() is not None
    del tiered
    assert gone() is None
