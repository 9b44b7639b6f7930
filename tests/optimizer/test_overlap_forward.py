"""Buckets that are stepped beside the next forward: whoever looks earlier finds the new value."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.optimizer.conftest import MakeTiered
from tests.optimizer.strange_optimizers import Counting
from tests.optimizer.training import (
    Outcome,
    differences,
    make_params,
    on_cpu,
    outcome,
)
from tests.optimizer.twenty_steps import SMALL, cases, check_twenty_steps
from tiered_mem.optimizer.guarded import guard_of


@pytest.mark.detector_only(why="takes long")
@pytest.mark.parametrize(("name", "residency", "missing"), cases())
def test_twenty_steps(name: str, residency: str, missing: str, device: str, make_tiered: MakeTiered) -> None:
    check_twenty_steps(name, residency, missing, device, make_tiered, "forward")


class Net(nn.Module):
    """Six layers. One has no bias, and another's weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=n != 3) for n in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x @ self.layers[1].weight  # type: ignore[operator]


class Training:
    """Trains a net. make: None for plain."""

    def __init__(self, device: str, make: MakeTiered | None) -> None:
        self.device = device
        torch.manual_seed(0)
        self.net = Net().to(device)
        self.params = list(self.net.parameters())
        self.average: Any = AveragedModel(self.net)
        self.optimizer: Any = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.manager = None
        if make is not None:
            self.optimizer = make(self.optimizer, bucket_bytes=SMALL, overlap="forward")
            self.manager = make.manager

    def loss(self, step: int) -> torch.Tensor:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(self.device)
        return self.net(x).square().sum()  # type: ignore[no-any-return]

    def step(self, number: int) -> None:
        loss = self.loss(number)
        if self.device != "cpu":
            # No memory to spare: states come to the device when they are needed.
            torch.get_device_module(self.device).reset_peak_memory_stats()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def run(self, steps: range) -> None:
        for number in steps:
            self.step(number)
            self.optimizer.zero_grad()

    def waiting(self) -> int:
        """How many parameters wait for their step."""
        return sum(guard_of(param) is not None for param in self.params)

    def outcome(self) -> Outcome:
        return outcome(self.optimizer, self.params)


def test_buckets_come_in_the_order_in_which_forward_uses_them(device: str, make_tiered: MakeTiered) -> None:
    """Which it learns in the first forward, and goes by in all that follow: another would bring some twice."""
    training = Training(device, make_tiered)
    training.net.layers = nn.ModuleList(reversed(training.net.layers))
    used = [param for layer in training.net.layers for param in layer.parameters()]
    order = {param: number for number, param in enumerate(used)}
    for number in range(5):
        training.step(number)
        coming = training.optimizer.states.stepping.coming
        first_used = [min(order[param] for param in bucket.params) for bucket in coming]
        assert number < 2 or first_used == sorted(first_used)
        assert number < 1 or len(first_used) > 2
        training.optimizer.zero_grad()


def test_the_log_says_that_nothing_can_wait(
    device: str, make_tiered: MakeTiered, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(device, make_tiered)
    views = [param.detach() for param in training.params]
    with caplog.at_level("INFO", "tiered_mem"):
        training.run(range(3))
    assert training.waiting() == 0
    assert sum("AdamW is stepped in step()" in line for line in caplog.messages) == 1
    views.clear()
    training.step(3)
    assert training.waiting() > 0


class Doubled(torch.autograd.Function):
    """A function whose first look at its argument is not at the elements."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 + 0 * x


def _ema(training: Training) -> Any:
    training.average.update_parameters(training.net)
    return training.average.module.state_dict()


def _saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=False)


def _in_place(training: Training) -> Any:
    with torch.no_grad():
        return training.params[5].mul_(2)


def _init(training: Training) -> Any:
    nn.init.constant_(training.params[5], 0.5)
    return training.params[5].detach()


def _by_function(training: Training) -> Any:
    (gradient,) = torch.autograd.grad(Doubled.apply(training.params[5]).sum(), training.params[5])
    return gradient, Doubled.apply(training.params[5]).detach()


def _functional(training: Training) -> Any:
    x = torch.ones(2, 8, device=training.device)
    return torch.func.functional_call(training.net, dict(training.net.named_parameters()), (x,)).detach()


def _checkpointed(training: Training) -> Any:
    x = torch.ones(2, 8, device=training.device, requires_grad=True)
    loss = checkpoint(training.net, x, use_reentrant=False).sum()
    return torch.autograd.grad(loss, x)


def _cleared(training: Training) -> Any:
    training.net.zero_grad(set_to_none=False)
    return [param.grad for param in training.params]


def _added(training: Training) -> Any:
    """A gradient that is added to the last one's: nobody has cleared it."""
    training.loss(77).backward()  # type: ignore[no-untyped-call]
    return [param.grad for param in training.params]


def _evaluated(training: Training) -> Any:
    training.net.eval()
    with torch.no_grad():
        result = training.loss(78)
    training.net.train()
    return result


def _new_group(training: Training) -> Any:
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, device=training.device))]})
    return training.optimizer.state_dict()


def _reloaded(training: Training) -> Any:
    training.optimizer.load_state_dict(on_cpu(training.optimizer.state_dict()))
    return training.net.state_dict()


def _other_weights(training: Training) -> Any:
    training.net.load_state_dict({name: torch.ones_like(v) for name, v in training.net.state_dict().items()})
    return training.net.state_dict()


def _moved(training: Training) -> Any:
    if training.manager is not None:
        training.manager.offload(training.net)
        training.manager.reload(training.net)
    return training.net.state_dict()


def _waited(training: Training) -> Any:
    if training.manager is not None:
        training.manager.synchronize()
        assert not training.waiting()
    return [param.detach() for param in training.params]


def _finished(training: Training) -> Any:
    if training.manager is not None:
        training.optimizer.finish()
        assert not training.waiting()
    return [param.data for param in training.params]


def _frozen(training: Training) -> Any:
    training.params[5].requires_grad_(False)
    result = training.params[5] * 1
    training.params[5].requires_grad_(True)
    return result


def _by_autocast(training: Training) -> Any:
    with torch.autocast(training.device, torch.bfloat16):
        return training.loss(79).detach()


def _in_inference(training: Training) -> Any:
    with torch.inference_mode():
        return training.loss(80).cpu().numpy().tolist()


def _by_vmap(training: Training) -> Any:
    rows = torch.arange(3.0, device=training.device)
    return torch.func.vmap(lambda row: row * training.params[5])(rows).detach()


def _by_transform(training: Training) -> Any:
    """Of a parameter itself torch.func sees nothing but memory: see docs/optimizer.md."""
    weights = {name: weight.detach() for name, weight in training.net.named_parameters()}
    x = torch.ones(2, 8, device=training.device)
    return torch.func.grad(lambda w: torch.func.functional_call(training.net, w, (x,)).sum())(weights)


def _in_a_mode(training: Training) -> Any:
    with Operators() as mode:
        training.loss(81)
    return mode.names


class Operators(TorchDispatchMode):
    """Sees the operators of a forward, and none of a step's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


LOOKS: dict[str, Callable[[Training], Any]] = {
    "detach": lambda t: t.params[5].detach(),
    "data": lambda t: t.params[5].data,
    "an operator": lambda t: (t.params[5] + 1).detach(),
    "the right operand": lambda t: (torch.ones(8, 8, device=t.device) @ t.params[4]).detach(),
    "linear": lambda t: nn.functional.linear(torch.ones(2, 8, device=t.device), t.params[4], t.params[5]).detach(),
    "a list": lambda t: torch.stack([t.params[4], t.params[6]]).detach(),
    "a foreach function": lambda t: torch._foreach_norm([p.detach() for p in t.params]),
    "an index": lambda t: t.params[4][1, 2].item(),
    "iteration": lambda t: [row.detach() for row in t.params[4]],
    "a list of numbers": lambda t: t.params[5].tolist(),
    "text": lambda t: str(t.params[5].detach().cpu()),
    "repr": lambda t: repr(t.params[5]),
    "format": lambda t: f"{t.params[5]}",
    "truth": lambda t: bool((t.params[5] > 0).all()),
    "equality": lambda t: torch.equal(t.params[5], t.params[5].clone()),
    "its memory": lambda t: t.params[5].untyped_storage().nbytes(),
    "a vector of all": lambda t: nn.utils.parameters_to_vector(t.params).detach(),
    "its own copy": lambda t: copy.deepcopy(t.params[5]).detach(),
    "a copy of the model": lambda t: copy.deepcopy(t.net).state_dict(),
    "pickle": lambda t: pickle.loads(pickle.dumps(t.params[5].cpu())).detach(),
    "torch.save of a parameter": lambda t: _saved(t.params[5]).detach(),
    "torch.save of a model": lambda t: _saved(t.net.state_dict()),
    "state_dict": lambda t: t.net.state_dict(),
    "state_dict of DCP": lambda t: get_model_state_dict(t.net),
    "another type": lambda t: t.net.double().float().state_dict(),
    "to": lambda t: t.params[5].to("cpu", torch.float64).detach(),
    "an average": _ema,
    "a change in place": _in_place,
    "init": _init,
    "a Function": _by_function,
    "functional_call": _functional,
    "checkpoint": _checkpointed,
    "evaluation": _evaluated,
    "autocast": _by_autocast,
    "inference mode": _in_inference,
    "vmap": _by_vmap,
    "a transform": _by_transform,
    "a mode that sees operators": _in_a_mode,
    "other weights": _other_weights,
    "frozen": _frozen,
    "offload of the model": _moved,
    "its gradient": lambda t: t.params[5].grad * 2,
    "norm of gradients": lambda t: nn.utils.get_total_norm([p.grad for p in t.params]),
    "clipping": lambda t: (nn.utils.clip_grad_norm_(t.params, 0.1), [p.grad for p in t.params]),
    "cleared gradients": _cleared,
    "a gradient that is added": _added,
    "optimizer.state": lambda t: [t.optimizer.state[p] for p in t.params],
    "optimizer.state_dict": lambda t: t.optimizer.state_dict(),
    "optimizer of DCP": lambda t: get_optimizer_state_dict(t.net, t.optimizer),
    "parameters of groups": lambda t: [p.detach() for p in t.optimizer.param_groups[0]["params"]],
    "a new group": _new_group,
    "loaded states": _reloaded,
    "synchronize": _waited,
    "finish": _finished,
}


@pytest.mark.parametrize("cleared", [True, False], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("look", LOOKS)
def test_who_looks_between_step_and_forward_finds_the_new_value(
    look: str, cleared: bool, device: str, make_tiered: MakeTiered
) -> None:
    if (cleared and "gradient" in look) or (cleared and look == "clipping"):
        pytest.skip("there are none")
    results = []
    for make in (None, make_tiered):
        training = Training(device, make)
        training.run(range(3))
        training.step(3)
        if cleared:
            training.optimizer.zero_grad()
        if make is not None:
            assert training.waiting() > 6, "else nothing is tested"
        found = on_cpu(_plain_types(LOOKS[look](training)))
        training.optimizer.zero_grad()
        training.run(range(4, 6))
        results.append((found, training.outcome()))
    (one, plain_outcome), (other, tiered_outcome) = results
    assert not differences(Outcome([], {"found": one}), Outcome([], {"found": other}))
    assert not differences(plain_outcome, tiered_outcome)


def _plain_types(thing: Any) -> Any:
    """Tuples as lists, and ordered dictionaries as others."""
    if isinstance(thing, dict):
        return {key: _plain_types(value) for key, value in thing.items()}
    return [_plain_types(each) for each in thing] if isinstance(thing, list | tuple) else thing


def test_shapes_and_types_can_be_read_while_it_waits(device: str, make_tiered: MakeTiered) -> None:
    training = Training(device, make_tiered)
    training.run(range(3))
    waiting = training.waiting()
    weight = training.params[4]
    assert guard_of(weight) is not None
    assert (weight.shape, weight.stride(), weight.numel(), weight.dtype) == ((8, 8), (8, 1), 64, torch.float32)
    assert weight.is_leaf
    assert weight.requires_grad
    assert weight.device.type == device
    assert weight.grad is None
    assert training.waiting() == waiting


def test_a_parameter_on_the_cpu_stays_there_while_it_waits(device: str, make_tiered: MakeTiered) -> None:
    params = [each for place in (device, "cpu") for each in make_params(place, shapes=[(64, 64), (64, 64)])]
    optimizer: Any = make_tiered(
        torch.optim.Adam(params, lr=0.1, foreach=False), bucket_bytes=SMALL, overlap="forward"
    )
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
    assert [param.device.type for param in params] == [device, device, "cpu", "cpu"]
    assert {guard_of(param) is not None for param in params[1:]} == {True}


def test_closing_the_manager_makes_the_rest_of_the_step(device: str, make_tiered: MakeTiered) -> None:
    plain_one, tiered = Training(device, None), Training(device, make_tiered)
    for training in (plain_one, tiered):
        training.run(range(3))
    assert tiered.waiting()
    make_tiered.manager.close()
    assert not tiered.waiting()
    assert all(map(torch.equal, plain_one.params, tiered.params))


def test_the_optimizer_may_go_while_parameters_wait(device: str, make_tiered: MakeTiered) -> None:
    plain_one, tiered = Training(device, None), Training(device, make_tiered)
    for training in (plain_one, tiered):
        training.run(range(3))
        training.optimizer = None
    assert tiered.waiting()
    assert all(map(torch.equal, plain_one.params, [param.detach() for param in tiered.params]))


def test_a_learning_rate_that_changes_is_of_the_next_step(device: str, make_tiered: MakeTiered) -> None:
    outcomes = []
    for make in (None, make_tiered):
        training = Training(device, make)
        scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, gamma=0.5)
        for number in range(5):
            training.step(number)
            scheduler.step()
            training.optimizer.zero_grad()
        assert training.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**5
        outcomes.append(training.outcome())
    assert not differences(*outcomes)


def test_a_group_without_gradients_counts_a_step_in_which_its_bucket_waits(
    device: str, make_tiered: MakeTiered
) -> None:
    counts = []
    for tiered in (False, True):
        first, *beside = params = make_params(device, shapes=[(256, 256), (4,), (5,)])
        optimizer: Any = Counting([{"params": [param]} for param in params], lr=0.1)
        if tiered:
            optimizer = make_tiered(optimizer, bucket_bytes=1 << 16, separable=True, overlap="forward")
        for number in range(4):
            for param in (first, beside[0], *beside[1 + number % 2 :]):  # the last one now and then
                param.grad = torch.ones_like(param)
            optimizer.step()
            if tiered and number > 1:
                assert guard_of(beside[0]) is not None
            optimizer.zero_grad()
        counts.append([group["step"] for group in optimizer.state_dict()["param_groups"]])
    assert counts[0] == counts[1] == [4, 4, 4]


@pytest.mark.parametrize("look", [list, len, dict], ids=["keys", "length", "items"])
def test_a_state_that_a_waiting_step_makes_is_there_for_who_looks_which_there_are(
    look: Callable[[Any], Any], device: str, make_tiered: MakeTiered
) -> None:
    first, second, late = make_params(device, shapes=[(256, 256), (4,), (5,)])
    optimizer = make_tiered(torch.optim.AdamW([first, second, late]), bucket_bytes=1 << 16, overlap="forward")
    for number in range(4):
        for param in (first, second, *([late] if number == 3 else [])):
            param.grad = torch.ones_like(param)
        assert late not in optimizer.state
        optimizer.step()
        optimizer.zero_grad()
    assert guard_of(late) is not None, "it waits with the one that shares its bucket"
    assert look(optimizer.state)
    assert guard_of(late) is None
    assert late in optimizer.state
    assert len(optimizer.state) == 3


def test_accumulation_clipping_and_a_scaler(device: str, make_tiered: MakeTiered) -> None:
    outcomes = []
    for make in (None, make_tiered):
        training = Training(device, make)
        scaler = torch.amp.GradScaler(device, init_scale=64.0)
        for number in range(5):
            for part in range(3):
                scaler.scale(training.loss(10 * number + part)).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(training.optimizer)
            nn.utils.clip_grad_norm_(training.params, 0.5)
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()
        outcomes.append(training.outcome())
    assert not differences(*outcomes)


def test_memory_that_others_have_too_is_stepped_at_once(device: str, make_tiered: MakeTiered) -> None:
    """Nobody could see who looks at it."""
    training = Training(device, make_tiered)
    alias = training.params[4].detach()
    training.run(range(2))
    before = alias.clone()
    training.run(range(2, 3))
    assert guard_of(training.params[4]) is None
    assert not torch.equal(before, alias)


def test_a_user_on_another_stream_waits_for_the_step(device: str, make_tiered: MakeTiered) -> None:
    if device == "cpu":
        pytest.skip("it has one stream")
    results = []
    for make in (None, make_tiered):
        training = Training(device, make)
        training.run(range(3))
        module = torch.get_device_module(device)
        side = module.Stream()
        side.wait_stream(module.current_stream())
        with module.stream(side):
            found = [(param * 2).detach() for param in training.params]
        module.current_stream().wait_stream(side)
        results.append([each.cpu() for each in found])
        training.run(range(3, 5))
        results[-1] += [param.detach().cpu() for param in training.params]
    assert all(map(torch.equal, *results))


def test_states_that_came_ahead_of_no_step_leave_the_host_alone(device: str, make_tiered: MakeTiered) -> None:
    """Others are loaded into the host memory that they were read from."""
    training = Training(device, make_tiered)
    training.run(range(2))
    states = training.optimizer.state_dict()
    with_room = torch.empty(1 << 20, device=device)
    del with_room  # which makes a peak
    training.loss(2).backward()  # type: ignore[no-untyped-call]
    training.optimizer.zero_grad()
    training.optimizer.load_state_dict(states)
    training.run(range(2, 5))
    plain_one = Training(device, None)
    plain_one.run(range(5))
    assert not differences(plain_one.outcome(), training.outcome())


def test_states_come_in_backward_where_there_is_room(device: str, make_tiered: MakeTiered) -> None:
    """And memory that others have just freed."""
    if device == "cpu":
        pytest.skip("it has no memory to spare")
    outcomes = []
    for make in (None, make_tiered):
        training = Training(device, make)
        for number in range(4):
            room = torch.ones(1 << 18, device=device)
            loss = training.loss(number) + (room * 2).sum() * 0
            del room
            loss.backward()
            training.optimizer.step()
            if make is not None and number:
                assert not training.waiting(), "all of it was there"
            training.optimizer.zero_grad()
        outcomes.append(training.outcome())
    assert not differences(*outcomes)


def test_buckets_are_stepped_one_by_one_as_forward_comes_to_them(device: str, make_tiered: MakeTiered) -> None:
    training = Training(device, make_tiered)
    training.run(range(3))
    x = torch.ones(2, 8, device=device)
    counts = [training.waiting()]
    for layer in training.net.layers:
        x = layer(x)
        counts.append(training.waiting())
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) > 3
    assert counts[-1] == 0
