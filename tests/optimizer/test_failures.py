"""What goes wrong is said, and nothing is half done without a word."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest
import torch

from tests.optimizer.conftest import MakeTiered
from tests.optimizer.strange_optimizers import Failing
from tests.optimizer.training import differences, give_gradients, make_params, outcome, train
from tiered_mem import TieringManager
from tiered_mem.errors import Closed, InterruptedStep, TierFull
from tiered_mem.optimizer.registered import RegisteredOptimizers

pytestmark = pytest.mark.once(why="an error comes from the host, which has no schedule")

MIB = 1 << 20


def test_a_full_host_tier_at_registration(device: str) -> None:
    """The optimizer is then as it was before, and can be used as it is."""
    results = []
    for tier in (False, True):
        params = make_params(device, shapes=[(512, 512)] * 4)
        optimizer = torch.optim.AdamW(params)
        train(optimizer, params, range(2))
        if tier:
            manager = TieringManager(policy="lru", device=device, host_bytes="4MiB")
            with manager, pytest.raises(TierFull) as caught:
                manager.register_optimizer(optimizer, bucket_bytes="2MiB")
            assert "optimizer states" in str(caught.value)
            assert caught.value.limit == 4 * MIB
            assert caught.value.needed >= 2 * MIB
        train(optimizer, params, range(2, 5))
        results.append(outcome(optimizer, params))
    assert not differences(*results)


def test_a_group_for_which_there_is_no_room_is_not_added(device: str, make_tiered: MakeTiered) -> None:
    results = []
    for tier in (False, True):
        params = make_params(device)
        large = make_params(device, shapes=[(2048, 2048)])
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(params)
        if tier:
            optimizer = make_tiered(optimizer, host_bytes="4MiB")
            with pytest.raises(TierFull):
                optimizer.add_param_group({"params": large})
        assert len(optimizer.param_groups) == 1
        train(optimizer, params, range(5))
        results.append(outcome(optimizer, params))
    assert not differences(*results)


def test_a_closed_manager(device: str) -> None:
    params = make_params(device)
    manager = TieringManager(policy="lru", device=device, host_bytes="16MiB")
    tiered = manager.register_optimizer(torch.optim.AdamW(params))
    train(tiered, params, range(2))
    manager.close()
    give_gradients(params, 2, missing=False)
    before = [param.detach().clone() for param in params]
    for use in (
        tiered.step,
        tiered.state_dict,
        lambda: tiered.load_state_dict({"state": {}, "param_groups": []}),
        lambda: tiered.state[params[0]],
    ):
        with pytest.raises(Closed, match="take state_dict"):
            use()
    assert all(torch.equal(*pair) for pair in zip(params, before, strict=True))
    with pytest.raises(Closed):
        manager.register_optimizer(torch.optim.AdamW(params))


def test_a_step_that_fails_in_its_first_part_may_be_tried_again(device: str, make_tiered: MakeTiered) -> None:
    """No more is known than that an optimizer's step has begun: unless that was before the first bucket."""
    params = make_params(device)
    tiered = make_tiered(torch.optim.AdamW(params))
    train(tiered, params, range(2))
    give_gradients(params, 2)

    def failing(*_: object) -> None:
        raise RuntimeError("no")

    handle = tiered.register_step_pre_hook(failing)
    with pytest.raises(RuntimeError, match="no"):
        tiered.step()
    handle.remove()
    tiered.step()


@pytest.mark.parametrize("victim", [0, 4])
def test_a_step_that_ends_in_the_middle_says_so(victim: int, device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    failing = Failing(params, lr=0.1, momentum=0.9)
    tiered = make_tiered(failing, bucket_bytes=1, separable=True)
    train(tiered, params, range(3), missing=False)
    saved = tiered.state_dict()
    weights = [param.detach().clone() for param in params]
    failing.victim = params[victim]
    give_gradients(params, 3, missing=False)
    with pytest.raises(InterruptedStep, match=f"when {victim} of 5 buckets had been stepped") as caught:
        tiered.step()
    assert str(caught.value.__cause__) == "out of luck"
    for use in (tiered.step, tiered.state_dict):
        with pytest.raises(InterruptedStep, match="from a checkpoint"):
            use()
    failing.victim = None
    tiered.load_state_dict(saved)
    with torch.no_grad():
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
    train(tiered, params, range(3, 6), missing=False)
    expected = make_params(device)
    plain = torch.optim.SGD(expected, lr=0.1, momentum=0.9)
    train(plain, expected, range(6), missing=False)
    assert not differences(outcome(plain, expected), outcome(tiered, params))


def test_a_keyboard_interrupt_in_the_middle_of_a_step(device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)

    class Interrupted(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            super().step()
            if any(param is params[2] and param.grad.sum() == 0 for param in self.param_groups[0]["params"]):
                raise KeyboardInterrupt

    tiered = make_tiered(Interrupted(params, lr=0.1, momentum=0.9), bucket_bytes=1, separable=True)
    train(tiered, params, range(2), missing=False)
    give_gradients(params, 2, missing=False)
    params[2].grad.zero_()
    with pytest.raises(KeyboardInterrupt):
        tiered.step()
    with pytest.raises(InterruptedStep, match="when 2 of 5"):
        tiered.step()


def test_no_device_memory_for_the_window(device: str, make_tiered: MakeTiered) -> None:
    """Nothing was touched: the step can be made when there is room."""
    module = torch.get_device_module(device)
    params = make_params(device, shapes=[(1024, 1024)] * 4)
    tiered = make_tiered(torch.optim.AdamW(params), bucket_bytes="16MiB")
    train(tiered, params, range(1), missing=False)
    give_gradients(params, 1, missing=False)
    module.empty_cache()
    module.set_per_process_memory_fraction(1e-4)
    between_others: list[torch.Tensor] = []  # pieces of the pool in which a bucket would fit
    try:
        with suppress(torch.OutOfMemoryError):
            while True:
                between_others.append(torch.empty(1 << 22, dtype=torch.uint8, device=device))
        with pytest.raises(torch.OutOfMemoryError):
            tiered.step()
    finally:
        module.set_per_process_memory_fraction(1.0)
    tiered.step()


def test_an_optimizer_in_a_cycle_that_dies_while_its_manager_is_closed(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may find it between any two lines."""
    manager = TieringManager(policy="lru", device=device, host_bytes="4MiB")
    tiered = manager.register_optimizer(torch.optim.AdamW(make_params(device)))
    tiered.cycle = tiered  # type: ignore[attr-defined]
    train(tiered, tiered.param_groups[0]["params"], range(1))
    del tiered
    free = RegisteredOptimizers.free

    def free_and_collect(optimizers: RegisteredOptimizers) -> None:
        free(optimizers)
        gc.collect()

    monkeypatch.setattr(RegisteredOptimizers, "free", free_and_collect)
    manager.close()
    assert manager.stats()["host.used.current"] == 0
