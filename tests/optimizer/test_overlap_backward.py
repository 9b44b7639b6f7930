"""Buckets that are stepped in backward: the same bits, fewer gradients, and an error for what cannot be."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models import small_stack
from tests.optimizer.conftest import MakeTiered
from tests.optimizer.strange_optimizers import MasterWeights
from tests.optimizer.training import (
    Outcome,
    backward,
    differences,
    make_params,
    outcome,
    train_by_backward,
)
from tests.optimizer.twenty_steps import SMALL, cases, check_twenty_steps
from tiered_mem.errors import InterruptedStep, OverlapRefused


@pytest.mark.detector_only(why="takes long")
@pytest.mark.parametrize(("name", "residency", "missing"), cases())
def test_twenty_steps(name: str, residency: str, missing: str, device: str, make_tiered: MakeTiered) -> None:
    check_twenty_steps(name, residency, missing, device, make_tiered, "backward")


def _adamw(params: Any, device: str, make_tiered: MakeTiered, **options: Any) -> Any:
    return make_tiered(torch.optim.AdamW(params), bucket_bytes=SMALL, overlap="backward", **options)


def test_from_the_second_step_on_gradients_are_gone_after_backward(device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    before = [param.detach().clone() for param in params]
    tiered = _adamw(params, device, make_tiered)
    backward(params, 0)
    assert all(param.grad is not None for param in params), "the first step looks on"
    tiered.step()
    tiered.zero_grad()
    after = [param.detach().clone() for param in params]
    assert not any(map(torch.equal, before, after))
    backward(params, 1)
    assert all(type(param) is not torch.nn.Parameter for param in params), (
        "they have been stepped, and have a guard"
    )
    tiered.step()
    assert all(type(param) is torch.nn.Parameter and param.grad is None for param in params)
    assert not any(map(torch.equal, after, [param.detach() for param in params]))


def test_gradients_that_are_to_stay_do(device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    tiered = _adamw(params, device, make_tiered, keep_gradients=True)
    for step in range(3):
        backward(params, step)
        kept = [param.grad for param in params]
        assert all(gradient is not None for gradient in kept)
        tiered.step()
        assert all(param.grad is gradient for param, gradient in zip(params, kept, strict=True))
        tiered.zero_grad()
    assert not differences(_plain_steps(device, 3), outcome(tiered, params))


def _plain_steps(device: str, steps: int) -> Outcome:
    params = make_params(device)
    optimizer = torch.optim.AdamW(params)
    for step in range(steps):
        backward(params, step)
        optimizer.step()
        optimizer.zero_grad()
    return outcome(optimizer, params)


USES: dict[str, Callable[[list[torch.nn.Parameter]], object]] = {
    "its gradient": lambda params: params[0].grad,
    "clipping": lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0),
    "clipping by value": lambda params: torch.nn.utils.clip_grad_value_(params, 1.0),
    "its value": lambda params: params[0].detach(),
    "an operator": lambda params: params[0] * 2,
    "a change": lambda params: torch.nn.init.zeros_(params[0]),
    "text": lambda params: str(params[0]),
    "data": lambda params: params[0].data,
    "a copy": lambda params: __import__("copy").deepcopy(params[0]),
    "another gradient": lambda params: setattr(params[0], "grad", torch.ones_like(params[0])),
}


@pytest.mark.parametrize("use", USES)
def test_no_parameter_can_be_used_between_backward_and_step(use: str, device: str, make_tiered: MakeTiered) -> None:
    """And the step is as if nobody had tried."""
    params = make_params(device)
    tiered = _adamw(params, device, make_tiered)
    for step in range(3):
        backward(params, step)
        if step:
            with pytest.raises(OverlapRefused, match='overlap="forward"'):
                USES[use](params)
        tiered.step()
        tiered.zero_grad()
    assert not differences(_plain_steps(device, 3), outcome(tiered, params))


def test_shapes_can_be_read_between_backward_and_step(device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    tiered = _adamw(params, device, make_tiered)
    train_by_backward(tiered, params, range(1))
    backward(params, 1)
    assert params[0].shape == (8, 6)
    assert params[0].numel() == 48
    assert params[0].dtype == torch.float32
    assert params[0].requires_grad
    tiered.step()


LOOKS: dict[str, Callable[[Any, MakeTiered], object]] = {
    "state_dict": lambda tiered, make: tiered.state_dict(),
    "state": lambda tiered, make: next(iter(tiered.state.values())),
    "zero_grad": lambda tiered, make: tiered.zero_grad(),
    "closure": lambda tiered, make: tiered.step(lambda: 0.0),
    "offload": lambda tiered, make: make.manager.offload(tiered),
    "reload": lambda tiered, make: make.manager.reload(tiered),
    "present": lambda tiered, make: tiered.present().__enter__(),
    "a new group": lambda tiered, make: tiered.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]}),
    "load": lambda tiered, make: tiered.load_state_dict({"state": {}, "param_groups": tiered.param_groups}),
}


@pytest.mark.parametrize("look", LOOKS)
def test_states_cannot_be_looked_at_between_backward_and_step(
    look: str, device: str, make_tiered: MakeTiered
) -> None:
    params = make_params(device)
    tiered = _adamw(params, device, make_tiered)
    for step in range(3):
        backward(params, step)
        if step:
            with pytest.raises(OverlapRefused, match="step"):
                LOOKS[look](tiered, make_tiered)
        tiered.step()
        tiered.zero_grad()
    assert not differences(_plain_steps(device, 3), outcome(tiered, params))


def test_clipping_shows_in_the_first_step_and_nothing_is_changed(device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    before = [param.detach().clone() for param in params]
    tiered = _adamw(params, device, make_tiered)
    backward(params, 0)
    torch.nn.utils.clip_grad_norm_(params, 1e9)  # which changes no value
    with pytest.raises(OverlapRefused, match=r"5 of 5 gradients were changed.*overlap=.forward"):
        tiered.step()
    assert all(map(torch.equal, before, [param.detach() for param in params]))
    tiered.zero_grad()
    train_by_backward(tiered, params, range(2))


def test_a_scaler_shows_in_the_first_step(device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    tiered = _adamw(params, device, make_tiered)
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    scaler.scale(params[0].square().sum()).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(OverlapRefused, match="a scaler"):
        scaler.step(tiered)


def test_a_hook_of_somebody_else_shows_in_the_first_step(device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    params[2].register_post_accumulate_grad_hook(lambda param: None)  # type: ignore[no-untyped-call]
    tiered = _adamw(params, device, make_tiered)
    backward(params, 0)
    with pytest.raises(OverlapRefused, match="1 parameters have hooks of others"):
        tiered.step()


def test_the_hook_of_an_attached_model_is_none_of_somebody_elses(device: str, make_tiered: MakeTiered) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, device=device) for _ in range(2)))
    tiered = _adamw([*model.parameters()], device, make_tiered)
    with make_tiered.manager.attach(model):
        for step in range(3):
            model(torch.ones(4, 16, device=device)).sum().backward()
            stepped = all(type(param) is not torch.nn.Parameter for param in model.parameters())
            assert stepped == (step > 0), "from the second step on they are, in backward"
            tiered.step()
            tiered.zero_grad()


@pytest.mark.parametrize("word", ["call", "context"])
def test_the_last_of_several_backwards(word: str, device: str, make_tiered: MakeTiered) -> None:
    outcomes = []
    for tier in (False, True):
        params = make_params(device)
        optimizer: Any = torch.optim.AdamW(params)
        if tier:
            optimizer = _adamw(params, device, make_tiered)
        for step in range(4):
            backward(params, 10 + step)
            backward(params, 20 + step)
            if not tier:
                backward(params, 30 + step)
            elif word == "call":
                optimizer.last_backward()
                backward(params, 30 + step)
            else:
                with optimizer.last_backward():
                    backward(params, 30 + step)
            stepped = all(type(param) is not torch.nn.Parameter for param in params)
            assert stepped is (tier and step > 0)
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append(outcome(optimizer, params))
    assert not differences(*outcomes)


def test_several_backwards_without_a_word_are_stepped_after_them(
    device: str, make_tiered: MakeTiered, caplog: pytest.LogCaptureFixture
) -> None:
    params = make_params(device)
    tiered = _adamw(params, device, make_tiered)
    with caplog.at_level("INFO", "tiered_mem"):
        for step in range(3):
            backward(params, 10 + step)
            backward(params, 20 + step)
            assert all(type(param) is torch.nn.Parameter for param in params)
            tiered.step()
            tiered.zero_grad()
    assert "call optimizer.last_backward()" in caplog.text


def test_a_second_backward_that_nobody_announced_ends_the_step(device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    tiered = _adamw(params, device, make_tiered)
    train_by_backward(tiered, params, range(2))
    first, second = (params[0] * 2).sum(), (params[0] * 3).sum()
    for param in params[1:]:
        first, second = first + param.sum(), second + param.sum()
    first.backward()  # type: ignore[no-untyped-call]
    with pytest.raises(InterruptedStep, match=r"got another gradient.*last_backward"):
        second.backward()  # type: ignore[no-untyped-call]
    with pytest.raises(InterruptedStep):
        tiered.step()


def test_a_backward_that_fails_in_the_middle_ends_the_step(device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    tiered = _adamw(params, device, make_tiered)
    saved = tiered.state_dict()
    train_by_backward(tiered, params, range(2))
    handle = params[0].register_hook(_fail)  # type: ignore[no-untyped-call]
    with pytest.raises(ZeroDivisionError):
        backward(params, 2)
    handle.remove()
    with pytest.raises(InterruptedStep, match="did not come to its end"):
        tiered.step()
    with pytest.raises(InterruptedStep):
        tiered.state_dict()
    tiered.load_state_dict(saved)
    with torch.no_grad():
        for param, fresh in zip(params, make_params(device), strict=True):
            param.grad = None
            param.copy_(fresh)
    for step in range(3):
        backward(params, step)
        tiered.step()
        tiered.zero_grad()
    assert not differences(_plain_steps(device, 3), outcome(tiered, params))


def _fail(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_a_learning_rate_that_changes_in_between_is_refused(device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    tiered = _adamw(params, device, make_tiered)
    train_by_backward(tiered, params, range(2))
    backward(params, 2)
    tiered.param_groups[0]["lr"] *= 0.5
    with pytest.raises(InterruptedStep, match="'lr' of a group was changed"):
        tiered.step()


def test_a_backward_on_another_stream(device: str, make_tiered: MakeTiered) -> None:
    """The stream of step(), and what comes there, waits for what was stepped."""
    if device == "cpu":
        pytest.skip("it has one stream")
    module = torch.get_device_module(device)
    side = module.Stream()
    outcomes = []
    for tier in (False, True):
        params = make_params(device)
        optimizer: Any = torch.optim.AdamW(params)
        if tier:
            optimizer = _adamw(params, device, make_tiered)
        for step in range(5):
            side.wait_stream(module.current_stream())
            with module.stream(side):
                backward(params, step)
            if not tier:
                module.current_stream().wait_stream(side)
            elif step == 0:
                module.current_stream().wait_stream(side)  # this one is made in step()
            optimizer.step()
            sum((param * 2).sum() for param in params)
            optimizer.zero_grad()
        outcomes.append(outcome(optimizer, params))
    assert not differences(*outcomes)


def test_gradients_that_are_made_on_another_stream(device: str, make_tiered: MakeTiered) -> None:
    """As FSDP2 does, which calls the hooks itself when it has reduced them."""
    if device == "cpu":
        pytest.skip("it has one stream")
    module = torch.get_device_module(device)
    side = module.Stream()
    outcomes = []
    for tier in (False, True):
        params = make_params(device)
        optimizer: Any = torch.optim.AdamW(params)
        if tier:
            optimizer = _adamw(params, device, make_tiered)
        for step in range(4):
            x = torch.ones(1, device=device, requires_grad=True)
            y = x * 2
            y.register_hook(functools.partial(_reduced, params, side, step))
            y.sum().backward()  # type: ignore[no-untyped-call]
            if step == 0 or not tier:
                module.current_stream().wait_stream(side)
            optimizer.step()
            for param in params:
                param.detach().mul_(1.5)
            optimizer.zero_grad()
        outcomes.append(outcome(optimizer, params))
    assert not differences(*outcomes)


def _reduced(params: Any, side: Any, step: int, gradient: torch.Tensor) -> None:
    module = torch.get_device_module(gradient.device)
    side.wait_stream(module.current_stream())
    with module.stream(side):
        for index, param in enumerate(params):
            param.grad = (param.detach() + index + step) * gradient.detach().sum()
            for hook in (param._post_accumulate_grad_hooks or {}).values():
                hook(param)


def test_a_parameter_whose_gradient_comes_late_is_stepped_by_step(device: str, make_tiered: MakeTiered) -> None:
    """It has had none in the step before, in which its bucket was stepped without it."""

    def late(step: int, index: int) -> bool:
        return step % 3 == 1 and index == 1

    outcomes = []
    for tier in (False, True):
        params = make_params(device)
        optimizer: Any = torch.optim.AdamW(params)
        if tier:
            optimizer = make_tiered(optimizer, bucket_bytes=1 << 20, overlap="backward")
        train_by_backward(optimizer, params, range(8), missing=late)
        outcomes.append(outcome(optimizer, params))
    assert not differences(*outcomes)


def test_a_parameter_that_is_used_twice_and_one_that_is_frozen(device: str, make_tiered: MakeTiered) -> None:
    outcomes = []
    for tier in (False, True):
        params = make_params(device)
        params[3].requires_grad_(False)
        optimizer: Any = torch.optim.AdamW(params)
        if tier:
            optimizer = _adamw(params, device, make_tiered)
        for step in range(6):
            params[3].requires_grad_(step >= 3)
            loss = (
                (params[0] @ params[1] * params[3]).sum()
                + params[0].sin().sum()
                + params[4].sum() * params[2].sum()
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append(outcome(optimizer, params))
    assert not differences(*outcomes)


def test_a_parameter_that_came_since_the_last_step(device: str, make_tiered: MakeTiered) -> None:
    """Its states are taken over by step(), before which nothing may be stepped."""
    outcomes = []
    for tier in (False, True):
        params, late = make_params(device), make_params(device, shapes=[(3, 4)])
        optimizer: Any = torch.optim.AdamW(params)
        if tier:
            optimizer = _adamw(params, device, make_tiered)
        train_by_backward(optimizer, params, range(2))
        optimizer.param_groups[0]["params"].extend(late)
        train_by_backward(optimizer, params + late, range(2, 6))
        outcomes.append(outcome(optimizer, params + late))
    assert not differences(*outcomes)


def test_an_optimizer_that_is_gone_steps_no_more(device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    tiered = _adamw(params, device, make_tiered)
    train_by_backward(tiered, params, range(3))
    del tiered
    gc.collect()
    before = [param.detach().clone() for param in params]
    backward(params, 3)
    assert all(param.grad is not None for param in params)
    assert all(map(torch.equal, before, [param.detach() for param in params]))


def test_gradients_that_stay_and_are_changed_after_their_use_end_the_step(
    device: str, make_tiered: MakeTiered
) -> None:
    params = make_params(device)
    tiered = _adamw(params, device, make_tiered, keep_gradients=True)
    train_by_backward(tiered, params, range(2))
    backward(params, 2)
    torch.nn.utils.clip_grad_norm_(params, 1e-3)
    with pytest.raises(InterruptedStep, match="gradients were changed between backward and step"):
        tiered.step()


def test_an_attached_model(device: str, make_tiered: MakeTiered) -> None:
    """It has a hook of its own at a weight, which looks at no gradient."""
    outcomes = []
    for tier in (False, True):
        model, x = small_stack(2, device)
        optimizer: Any = torch.optim.AdamW(model.parameters())
        if tier:
            optimizer = _adamw(model.parameters(), device, make_tiered)
            make_tiered.manager.attach(model, min_bytes=1)
        for _ in range(4):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append(outcome(optimizer, list(model.parameters())))
    assert not differences(*outcomes)


def test_an_optimizer_of_somebody_else_that_draws_no_random_numbers(device: str, make_tiered: MakeTiered) -> None:
    outcomes = []
    for tier in (False, True):
        params = make_params(device)
        optimizer: Any = MasterWeights(params)
        if tier:
            optimizer = make_tiered(optimizer, bucket_bytes=SMALL, separable=True, overlap="backward")
        train_by_backward(optimizer, params, range(5))
        outcomes.append(outcome(optimizer, params))
    assert not differences(*outcomes)


@pytest.mark.parametrize(
    ("make", "separable", "why"),
    [
        (lambda p: torch.optim.LBFGS(p), None, "stepped at once"),
        (lambda p: _Drawing(p), True, "draws random numbers"),
        # There may be more parameters later.
        (lambda p: _Drawing(p[:1]), True, "draws random numbers"),
        (lambda p: _Drawing([p[0].requires_grad_(False)]), True, "draws random numbers"),
        (lambda p: _Drawing([torch.nn.Parameter(p[0].detach()[:0])]), True, "register it with its parameters"),
    ],
    ids=["at once", "random", "random, one parameter", "random, all frozen", "nothing to try"],
)
def test_what_cannot_be_stepped_like_this_is_refused_at_registration(
    make: Any, separable: bool | None, why: str, device: str, make_tiered: MakeTiered
) -> None:
    with pytest.raises(ValueError, match=why):
        make_tiered(make(make_params(device)), separable=separable, overlap="backward")


class _Drawing(torch.optim.SGD):
    """Adds noise."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(torch.rand(()).item() * param.grad)


def test_an_overlap_that_there_is_not(device: str, make_tiered: MakeTiered) -> None:
    with pytest.raises(ValueError, match="overlap is 'sideways'; there are 'backward'"):
        make_tiered(torch.optim.AdamW(make_params(device)), overlap="sideways")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep_gradients"):
        make_tiered(torch.optim.AdamW(make_params(device)), keep_gradients=True)
