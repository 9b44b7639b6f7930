"""An optimizer of which nothing is known is stepped at once, and whatever it does is right."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.conftest import KIND
from tests.optimizer.conftest import MakeTiered
from tests.optimizer.strange_optimizers import (
    Clipped,
    Decaying,
    Estimates,
    Failing,
    Flat,
    GlobalNorm,
    Growing,
    ScheduleFree,
    Sharp,
    Skipping,
)
from tests.optimizer.training import (
    RESIDENCIES,
    Outcome,
    differences,
    give_gradients,
    make_params,
    outcome,
    train,
)

Make = Callable[[Sequence[torch.nn.Parameter]], Optimizer]
ON_A_DEVICE = pytest.mark.skipif(KIND == "cpu", reason="on the cpu the step counts, too, are states to be moved")
KINDS: dict[str, Make] = {
    "clipped": lambda params: Clipped(params, lr=1e-2),
    "global norm": GlobalNorm,
    "estimates": Estimates,
    "skipping": lambda params: Skipping(params, lr=0.1, momentum=0.9),
    "decaying": Decaying,
    "flat": Flat,
}


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_has_the_same_values(kind: str, residency: str, device: str, make_tiered: MakeTiered) -> None:
    """As the parts of a step would not have, with buckets as small as can be."""
    results = []
    for tier in (False, True):
        params = make_params(device)
        optimizer = KINDS[kind](params)
        if tier:
            optimizer = make_tiered(optimizer, residency=residency, bucket_bytes=1)
            assert optimizer.at_once
        for step in range(8):
            give_gradients(params, step, missing=kind != "flat")
            if params[step % 5].grad is not None:
                params[step % 5].grad.mul_(1e4)
            if step == 3 and kind == "skipping":
                params[2].grad.view(-1)[0] = torch.inf
            optimizer.step()
        results.append(outcome(optimizer, params))
    assert not differences(*results)


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs(search: str | None, residency: str, device: str, make_tiered: MakeTiered) -> None:
    """It keeps lists of tensors that grow, all of them with its first parameter, and calls a closure many times."""
    results = []
    for tier in (False, True):
        params = make_params(device)
        lbfgs = torch.optim.LBFGS(params, lr=0.3, max_iter=3, history_size=4, line_search_fn=search)
        optimizer = make_tiered(lbfgs, residency=residency) if tier else lbfgs
        hooks: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, hooks=hooks: hooks.append("before"))
        optimizer.register_step_post_hook(lambda *_, hooks=hooks: hooks.append("after"))
        losses = [minimise(optimizer, params, step) for step in range(3)]
        optimizer.load_state_dict(optimizer.state_dict())
        losses += [minimise(optimizer, params, step) for step in range(3, 6)]
        assert hooks == ["before", "after"] * 6
        results.append((losses, outcome(optimizer, params)))
    (plain, expected), (tiered, found) = results
    assert plain == tiered
    assert len(expected.state_dict["state"][0]["old_dirs"]) == 4
    assert not differences(expected, found)


def minimise(optimizer: Optimizer, params: Sequence[torch.nn.Parameter], step: int) -> tuple[float, int]:
    """One step. The loss, and how often the closure was called."""
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = sum(((p - step).pow(2) * (1 + p.abs())).sum() for p in params)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        return loss.detach()

    return float(optimizer.step(closure)), calls  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "separable", "calls"),
    [
        (lambda params: torch.optim.AdamW(params, lr=0.1), None, 1),
        (lambda params: torch.optim.AdamW(params, lr=0.1), False, 1),
        (lambda params: Sharp(params, lr=0.1, momentum=0.9), None, 2),
        (lambda params: Growing(params), True, 0),
    ],
    ids=["adamw", "adamw at once", "sharp", "one that does not care"],
)
def test_a_closure_is_called_as_often_as_without(
    make: Make, separable: bool | None, calls: int, device: str, make_tiered: MakeTiered
) -> None:
    """Its backward may run on another thread, which must not wait for the one that steps."""
    results = []
    for tier in (False, True):
        params = make_params(device)
        optimizer = make(params)
        if tier:
            optimizer = make_tiered(optimizer, separable=separable)
        give_gradients(params, 0)
        counted = 0

        def closure(optimizer: Optimizer = optimizer, params: Any = params) -> torch.Tensor:
            nonlocal counted
            counted += 1
            optimizer.zero_grad()
            loss = sum(((p - counted) ** 2).sum() for p in params)
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            return loss.detach()

        for _ in range(5):
            loss = optimizer.step(closure)  # type: ignore[arg-type]
            assert (loss is None) == (calls == 0)
            if calls == 0:
                closure()
        assert counted == 5 * max(calls, 1)
        results.append(outcome(optimizer, params))
    assert not differences(*results)


@pytest.mark.parametrize("before", [0, 2])
def test_what_shares_its_memory_stays_on_the_device(before: int, device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    flat = Flat(params)
    train(flat, params, range(before), missing=False)
    tiered = make_tiered(flat)
    train(tiered, params, range(before, 3), missing=False)
    expected = make_params(device)
    plain = Flat(expected)
    train(plain, expected, range(3), missing=False)
    assert not differences(outcome(plain, expected), outcome(tiered, params))
    assert tiered.step_bytes == 512 * len(params), "the one state that is nobody else's"
    states = [state for bucket in tiered.states.pipeline.buckets for state in bucket.states.values()]
    assert all(state["master"].data_ptr() in {param.data_ptr() for param in params} for state in states)


def test_a_step_that_fails_leaves_what_it_does_without(device: str, make_tiered: MakeTiered) -> None:
    """And may be made again."""
    results = []
    for tier in (False, True):
        params = make_params(device)
        failing = Failing(params, lr=0.1, momentum=0.9)
        optimizer = make_tiered(failing) if tier else failing
        train(optimizer, params, range(3))
        failing.victim = params[1]
        give_gradients(params, 3)
        with pytest.raises(RuntimeError, match="out of luck"):
            optimizer.step()
        failing.victim = None
        optimizer.load_state_dict(optimizer.state_dict())
        train(optimizer, params, range(3, 6))
        results.append(outcome(optimizer, params))
    assert not differences(*results)


def test_between_steps_states_are_away_whatever_shape_they_have(
    device: str, device_module: Any, make_tiered: MakeTiered
) -> None:
    params = make_params(device, shapes=[(64, 64), (32,)])
    held = []
    for kind in (torch.optim.SGD, Growing):
        optimizer = make_tiered(kind(params, lr=0.01))  # type: ignore[call-arg]
        train(optimizer, params, range(8), missing=False)
        device_module.synchronize()
        held.append(device_module.memory_allocated())
    assert held[0] == held[1]
    assert optimizer.step_bytes >= 4 * params[0].nbytes
    assert optimizer.host_bytes == optimizer.step_bytes


def test_there_is_no_room_for_what_has_grown(
    device: str, make_tiered: MakeTiered, caplog: pytest.LogCaptureFixture
) -> None:
    """It stays on the device, and the step counts."""
    results = []
    for tier in (False, True):
        params = make_params(device, shapes=[(256, 256)])
        optimizer: Optimizer = Growing(params)
        if tier:
            optimizer = make_tiered(optimizer, host_bytes="1MiB")
        train(optimizer, params, range(10), missing=False)
        results.append(outcome(optimizer, params))
    assert "stay on the device: host tier" in caplog.text
    assert not differences(*results)


@ON_A_DEVICE
def test_what_a_step_takes_is_said(device: str, make_tiered: MakeTiered, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tiered_mem.optimizer")
    params = make_params(device, shapes=[(256, 256)] * 4)
    tiered = make_tiered(Clipped(params), bucket_bytes="512KiB")
    assert tiered.step_bytes == 8 * params[0].nbytes
    assert "Clipped is stepped at once: all of its states, 2.0 MiB as far as is known" in caplog.text
    caplog.clear()
    known = make_tiered(torch.optim.AdamW(params), bucket_bytes="256KiB")
    assert (known.at_once, known.step_bytes) == (False, 1 << 20), "two buckets, and the largest state"
    assert "at once" not in caplog.text


@pytest.mark.skipif(KIND == "cpu", reason="the cpu counts no memory")
def test_a_step_takes_as_much_device_memory_as_is_said(device: str, make_tiered: MakeTiered) -> None:
    module = torch.get_device_module(device)
    params = make_params(device, shapes=[(256, 256)] * 4)
    tiered = make_tiered(torch.optim.SGD(params, lr=0.1, momentum=0.9), separable=False)
    train(tiered, params, range(2), missing=False)
    give_gradients(params, 2, missing=False)
    module.synchronize()
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    tiered.step()
    assert tiered.step_bytes == 4 * params[0].nbytes
    assert 0 <= module.max_memory_allocated() - before - tiered.step_bytes <= 16 << 10
    module.synchronize()
    assert module.memory_allocated() == before


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("separable", [None, True])
@pytest.mark.parametrize("present", [False, True])
def test_what_an_optimizer_does_beside_its_steps(
    present: bool, separable: bool | None, residency: str, device: str, make_tiered: MakeTiered
) -> None:
    """By a method of its own, or inside of present()."""
    results: list[list[Outcome]] = []
    for tier in (False, True):
        params = make_params(device)
        optimizer: Any = ScheduleFree(params)
        if tier:
            optimizer = make_tiered(optimizer, residency=residency, separable=separable)
        seen = []
        for step in range(6):
            train(optimizer, params, [step])
            for training in (False, True):
                if tier and present:
                    with optimizer.present() as wrapped:
                        wrapped.switch(training)
                else:
                    optimizer.switch(training)
                seen.append(outcome(optimizer, params))
        results.append(seen)
    for one, other in zip(*results, strict=True):
        assert not differences(one, other)


def test_steps_are_made_inside_of_present(device: str, make_tiered: MakeTiered) -> None:
    """They are those of the wrapped optimizer. What would move its states is refused."""
    params, expected = make_params(device), make_params(device)
    plain = torch.optim.AdamW(expected)
    tiered = make_tiered(torch.optim.AdamW(params))
    train(plain, expected, range(4))
    train(tiered, params, [0])
    saved = tiered.state_dict()
    with tiered.present() as wrapped, tiered.present():
        assert all(value.device == params[0].device for value in tensors_of(wrapped))
        train(tiered, params, [1, 2])
        assert tiered.state_dict()["state"].keys() == plain.state_dict()["state"].keys()
        for move in (
            tiered.states.offload,
            lambda: tiered.load_state_dict(saved),
            lambda: tiered.add_param_group({"params": make_params(device)}),
        ):
            with pytest.raises(RuntimeError, match=r"inside of present\(\)"):
                move()
    assert not tiered.states.here
    train(tiered, params, [3])
    assert not differences(outcome(plain, expected), outcome(tiered, params))


def tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
