"""What an optimizer has beyond torch's interface, and what the original is to those who knew it before."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from tests.optimizer.conftest import MakeTiered
from tests.optimizer.strange_optimizers import Failing, ScheduleFree, WithRate
from tests.optimizer.training import RESIDENCIES, differences, give_gradients, make_params, outcome, train
from tiered_mem import Closed
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer


class Scaled(WithRate):
    """Its step takes a scale, and it can say how large its means are."""

    rate_of_decay = 0.9

    @torch.no_grad()
    def step(self, closure: Any = None, scale: float = 1.0) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    mean.mul_(self.rate_of_decay).add_(param.grad, alpha=scale)
                    param.sub_(mean, alpha=group["lr"])

    def norm(self) -> torch.Tensor:
        """On the parameters' device, as it is of both."""
        return torch.stack([(state["mean"] * param).sum() for param, state in self.state.items()]).sum()

    def forget(self, param: torch.Tensor) -> None:
        self.state.pop(param, None)

    def twice(self, value: int) -> int:
        return 2 * value


@pytest.mark.parametrize("separable", [None, True])
def test_methods_find_the_states_and_attributes_are_the_optimizers(
    separable: bool | None, device: str, make_tiered: MakeTiered
) -> None:
    results = []
    for tier in (False, True):
        params = make_params(device)
        optimizer: Any = Scaled(params)
        if tier:
            optimizer = make_tiered(optimizer, separable=separable)
        train(optimizer, params, [0, 1], missing=False)
        norms = [optimizer.norm()]
        optimizer.forget(params[1])
        optimizer.rate_of_decay = 0.5
        give_gradients(params, 2, missing=False)
        optimizer.step(scale=3.0)
        norms.append(optimizer.norm())
        results.append((norms, outcome(optimizer, params)))
    (plain, expected), (tiered, found) = results
    assert optimizer.wrapped.rate_of_decay == optimizer.rate_of_decay == 0.5
    assert all(map(torch.equal, plain, tiered))
    assert not differences(expected, found)


def test_a_method_that_does_not_look_at_the_states_moves_none(device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    optimizer: Any = make_tiered(Scaled(params))
    train(optimizer, params, [0], missing=False)
    before = optimizer.states.version
    assert optimizer.twice(3) == 6
    assert optimizer.states.version == before
    optimizer.norm()
    assert optimizer.states.version > before
    assert not optimizer.states.here


def test_what_neither_has_is_missing(device: str, make_tiered: MakeTiered) -> None:
    """Trainers ask for train() and eval() like this."""
    optimizer: Any = make_tiered(torch.optim.AdamW(make_params(device)))
    assert not hasattr(optimizer, "train")
    assert hasattr(make_tiered(ScheduleFree(make_params(device))), "switch")
    with pytest.raises(AttributeError, match="'AdamW' object has no attribute 'train'"):
        optimizer.train()
    optimizer.note = "mine"
    assert not hasattr(optimizer.wrapped, "note")


def test_what_is_set_is_set_where_it_counts(device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    optimizer: Any = make_tiered(Failing(params, lr=0.1))
    optimizer.victim = params[1]
    give_gradients(params, 0)
    with pytest.raises(RuntimeError, match="out of luck"):
        optimizer.step()


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("make", [torch.optim.AdamW, Scaled])
def test_a_scheduler_from_before_reads_the_originals_state(
    make: Callable[..., torch.optim.Optimizer], residency: str, device: str, make_tiered: MakeTiered
) -> None:
    """Where a state is without tiering: what is computed of it has the same bits."""
    results = []
    for tier in (False, True):
        params = make_params(device)
        original = optimizer = make(params, lr=0.1)

        def rate(epoch: int, original: Any = original) -> float:
            states = [original.state[group["params"][0]] for group in original.param_groups]
            means = [value for state in states for key, value in state.items() if key in ("mean", "exp_avg")]
            return 1 / (1 + sum(float(mean.norm()) for mean in means))

        scheduler = LambdaLR(original, rate)
        if tier:
            optimizer = make_tiered(original, residency=residency)
        for step in range(4):
            give_gradients(params, step, missing=False)
            optimizer.step()
            scheduler.step()
        results.append(outcome(optimizer, params))
    assert not differences(*results)
    assert scheduler.get_last_lr()[0] < 0.1


class Registered(NamedTuple):
    """An optimizer that was registered, what came back, and its parameters."""

    original: torch.optim.Optimizer
    tiered: TieredOptimizer
    params: list[torch.nn.Parameter]


@pytest.fixture
def registered(device: str, make_tiered: MakeTiered) -> Registered:
    """One that has made three steps."""
    params = make_params(device)
    original = torch.optim.AdamW(params, lr=0.1, amsgrad=True)
    made = Registered(original, make_tiered(original), params)
    train(made.tiered, params, range(3), missing=False)
    return made


def test_the_originals_state_is_the_state_of_now(registered: Registered) -> None:
    original, tiered, params = registered
    first = params[0]
    seen = original.state[first]
    assert seen["exp_avg"].device == first.device
    seen["exp_avg"].fill_(100)
    train(tiered, params, [3], missing=False)
    again = original.state[first]
    assert not torch.equal(again["exp_avg"], seen["exp_avg"])
    assert all(torch.equal(again[key].cpu(), value) for key, value in tiered.state[first].items())
    assert list(map(id, original.state)) == list(map(id, params))
    assert len(original.state) == len(params)
    stranger: Any = torch.zeros(1)
    assert (stranger in original.state, original.state.get(stranger), original.state[stranger]) == (False, None, {})
    assert not differences(*(outcome(each, params) for each in (original, tiered)))


def test_changes_of_the_originals_state_are_refused(registered: Registered) -> None:
    state, first = registered.original.state, registered.params[0]
    changes: tuple[Callable[[], Any], ...] = (
        lambda: state.update({first: {}}),
        state.clear,
        lambda: state.pop(first),
        lambda: state.setdefault(first, {}),
    )
    for change in changes:
        with pytest.raises(TypeError, match=r"inside of present\(\)"):
            change()
    with registered.tiered.present():
        assert type(registered.original.state) is defaultdict


def test_a_step_of_the_original_is_refused(registered: Registered) -> None:
    """Its states would be copies: the weights would be others than without tiering."""
    original, tiered, params = registered
    before = outcome(tiered, params)
    give_gradients(params, 3, missing=False)
    with pytest.raises(RuntimeError, match="step what register_optimizer returned"):
        original.step()
    assert not differences(outcome(tiered, params), before)
    with tiered.present():
        original.step()
    twins = make_params(params[0].device.type)
    plain = torch.optim.AdamW(twins, lr=0.1, amsgrad=True)
    train(plain, twins, range(3), missing=False)
    give_gradients(twins, 3, missing=False)
    plain.step()
    assert not differences(outcome(tiered, params), outcome(plain, twins))
    tiered.give_back().step()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # of torch's copies
def test_a_copy_of_the_original_is_a_plain_optimizer(registered: Registered) -> None:
    expected = outcome(registered.tiered, [])
    for twin in (copy.deepcopy(registered.original), pickle.loads(pickle.dumps(registered.original))):
        assert type(twin.state) is defaultdict
        assert not differences(outcome(twin, []), expected)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # of torch's copies
@pytest.mark.parametrize("reads", [False, True])
def test_what_is_loaded_into_the_original_counts(reads: bool, registered: Registered, device: str) -> None:
    original, tiered, params = registered
    twins = make_params(device)
    plain = torch.optim.AdamW(twins, lr=0.1, amsgrad=True)
    train(plain, twins, range(5), missing=False)
    original.load_state_dict(copy.deepcopy(plain.state_dict()))
    with torch.no_grad():
        for param, twin in zip(params, twins, strict=True):
            param.copy_(twin)
    if reads:
        assert not differences(outcome(plain, twins), outcome(tiered, params))
    for optimizer, trained in ((plain, twins), (tiered, params)):
        train(optimizer, trained, [5, 6], missing=False)
    assert not differences(outcome(plain, twins), outcome(tiered, params))
    assert not tiered.states.here


def test_given_back_the_original_has_a_state_of_its_own(registered: Registered) -> None:
    own = registered.tiered.give_back()
    assert own is registered.original
    assert type(own.state) is defaultdict
    assert all(state["exp_avg"].device == registered.params[0].device for state in own.state.values())


def test_without_the_manager_the_originals_state_is_an_error(device: str, make_tiered: MakeTiered) -> None:
    """And not empty, as if no step had been made."""
    originals = [torch.optim.AdamW(make_params(device)) for _ in range(2)]
    tiered = [make_tiered(originals[0])]
    tiered.clear()
    make_tiered.manager.stats()  # which frees what nobody has any more
    tiered.append(make_tiered(originals[1]))
    make_tiered.manager.close()
    for original in originals:
        with pytest.raises(Closed):
            original.state_dict()
        with pytest.raises(Closed):
            original.step()


def test_what_was_registered_and_not_kept_is_an_error(device: str, make_tiered: MakeTiered) -> None:
    """Before its memory is free as well."""
    original = torch.optim.AdamW(make_params(device))
    make_tiered(original)
    with pytest.raises(RuntimeError, match="step what register_optimizer returned"):
        original.step()


@pytest.mark.usefixtures("no_gc")
def test_nothing_holds_on_to_the_original(device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    original = Scaled(params)
    tiered: Any = make_tiered(original)
    train(tiered, params, [0], missing=False)
    tiered.norm()
    assert original.state[params[0]]
    gone = [weakref.ref(original), weakref.ref(original.state)]
    del original, tiered
    make_tiered.manager.stats()
    assert [each() for each in gone] == [None, None]
    assert not gc.isenabled()
