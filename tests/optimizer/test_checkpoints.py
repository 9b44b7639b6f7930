"""A tiered optimizer's state_dict is that of an optimizer of torch, in both directions."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.optim import Optimizer

from tests.conftest import KIND
from tests.optimizer.conftest import MakeTiered
from tests.optimizer.strange_optimizers import MasterWeights
from tests.optimizer.training import (
    OPTIMIZERS,
    Outcome,
    differences,
    make_params,
    on_cpu,
    outcome,
    train,
)
from tiered_mem.errors import InterruptedStep
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer

RESIDENCIES = ("disk", "host", "device-until-offload")
DEVICES = list(dict.fromkeys((KIND, "cpu")))
KINDS = ("adamw-amsgrad", "adam-fused", "sgd-momentum", "adafactor", "nadam")
KIB = 1 << 10
MIB = 1 << 20


class Place(NamedTuple):
    """Where states are when they are saved or loaded."""

    residency: str
    offloaded: bool = False

    def __str__(self) -> str:
        return f"{self.residency}{', offloaded' if self.offloaded else ''}"


PLACES = [*map(Place, RESIDENCIES), Place("device-until-offload", offloaded=True)]


class Trainee:
    """Parameters and their optimizer. place: where its states are to be; None for an unwrapped one."""

    def __init__(
        self,
        place: Place | None,
        make_tiered: MakeTiered,
        kind: str | Callable[..., Optimizer] = "adamw-amsgrad",
        device: str = KIND,
        **options: Any,
    ) -> None:
        self.params = make_params(device)
        self.optimizer = (OPTIMIZERS[kind] if isinstance(kind, str) else kind)(self.params)
        self.place = place
        if place is not None:
            self.optimizer = make_tiered(self.optimizer, residency=place.residency, device=device, **options)

    def train(self, *steps: int, missing: bool = True) -> Trainee:
        train(self.optimizer, self.params, steps, missing=missing)
        return self.settle()

    def settle(self) -> Trainee:
        """Makes the place be as it says."""
        if self.place is not None and self.place.offloaded:
            tiered(self).states.offload()
        return self

    def resume(self, saved: Saved) -> Trainee:
        """Goes on where another one was."""
        self.set_weights(saved.weights)
        self.optimizer.load_state_dict(saved.state_dict)
        return self

    def set_weights(self, weights: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for param, weight in zip(self.params, weights, strict=True):
                param.copy_(weight)

    def save(self) -> Saved:
        return Saved([param.detach().cpu().clone() for param in self.params], self.optimizer.state_dict())

    def differs(self, other: Trainee) -> list[str]:
        return differences(outcome(self.optimizer, self.params), outcome(other.optimizer, other.params))


class Saved(NamedTuple):
    weights: list[torch.Tensor]
    state_dict: dict[str, Any]


def tiered(trainee: Trainee) -> TieredOptimizer:
    assert isinstance(trainee.optimizer, TieredOptimizer)
    return trainee.optimizer


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)


@pytest.fixture(params=PLACES, ids=str)
def place(request: pytest.FixtureRequest) -> Place:
    chosen: Place = request.param
    return chosen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_an_unwrapped_optimizer_goes_on_from_a_tiered_one(
    device: str, place: Place, kind: str, make_tiered: MakeTiered
) -> None:
    saved = Trainee(place, make_tiered, kind, device).train(0, 1, 2).save()
    resumed = Trainee(None, make_tiered, kind, device).resume(saved).train(3, 4, 5)
    expected = Trainee(None, make_tiered, kind, device).train(0, 1, 2, 3, 4, 5)
    assert not expected.differs(resumed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_tiered_optimizer_goes_on_from_an_unwrapped_one(
    device: str, place: Place, kind: str, make_tiered: MakeTiered
) -> None:
    """Whatever it has come to itself is gone."""
    saved = Trainee(None, make_tiered, kind, device).train(0, 1, 2).save()
    resumed = Trainee(place, make_tiered, kind, device).train(7, 8).resume(saved).settle().train(3, 4, 5)
    expected = Trainee(None, make_tiered, kind, device).train(0, 1, 2, 3, 4, 5)
    assert not expected.differs(resumed)


@pytest.mark.parametrize("to", PLACES, ids=str)
def test_a_file_is_loaded_in_another_residency(
    device: str, place: Place, to: Place, tmp_path: Path, make_tiered: MakeTiered
) -> None:
    saved = Trainee(place, make_tiered).train(0, 1, 2).save()
    # A file holds whole storages.
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors_in(saved.state_dict))
    torch.save(saved.state_dict, tmp_path / "optimizer.pt")
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    resumed = Trainee(to, make_tiered).settle().resume(saved._replace(state_dict=loaded)).settle().train(3, 4, 5)
    expected = Trainee(None, make_tiered).train(0, 1, 2, 3, 4, 5)
    assert not expected.differs(resumed)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # of torch's copies of groups
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loaded", [False, True])
def test_later_steps_do_not_change_a_state_dict(
    device: str, place: Place, loaded: bool, make_tiered: MakeTiered
) -> None:
    """Nor does loading it make its tensors the optimizer's own."""

    def adam(params: Any) -> Optimizer:
        return torch.optim.Adam(params, lr=torch.tensor(0.01), foreach=False)

    trainee = Trainee(place, make_tiered, adam, device).train(0, 1, 2)
    saved = trainee.save()
    before = on_cpu(saved.state_dict)
    assert all(tensor.is_cpu for tensor in tensors_in(saved.state_dict))
    if loaded:
        trainee.optimizer.load_state_dict(saved.state_dict)
    trainee.optimizer.param_groups[0]["lr"].fill_(0.5)
    trainee.train(3, 4, 5)
    assert not differences(Outcome([], before), Outcome([], saved.state_dict))


def backward(trainee: Trainee) -> None:
    """Gives all parameters gradients. From the second step on the first bucket comes to the device meanwhile."""
    device = trainee.params[0].device
    loss = sum((param.square().sum() for param in trainee.params), torch.zeros((), device=device))
    spare = torch.zeros(MIB, device=device)  # so that there is room for it below the peak
    del spare
    loss.backward()


def test_a_state_dict_between_backward_and_step(device: str, place: Place, make_tiered: MakeTiered) -> None:
    results = []
    for here in (None, place):
        trainee = Trainee(here, make_tiered, bucket_bytes=MIB)
        saved = []
        for _ in range(5):
            backward(trainee)
            state_dict = trainee.optimizer.state_dict()
            saved.append(state_dict if here else on_cpu(state_dict))
            trainee.optimizer.step()
            trainee.optimizer.zero_grad()
        results.append([Outcome([], state_dict) for state_dict in saved])
    for one, other in zip(*results, strict=True):
        assert not differences(one, other)


@pytest.mark.parametrize("wrong", ["a group less", "a parameter less"])
def test_groups_that_do_not_match_change_nothing(
    device: str, place: Place, wrong: str, make_tiered: MakeTiered
) -> None:
    def two_groups(params: Any) -> Optimizer:
        return torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:], "lr": 0.1}])

    trainee = Trainee(place, make_tiered, two_groups).train(0, 1, 2)
    saved = trainee.optimizer.state_dict()
    if wrong == "a group less":
        saved["param_groups"].pop()
    else:
        saved["param_groups"][1]["params"].pop()
    saved["param_groups"][0]["lr"] = 100.0
    with pytest.raises(ValueError, match="group"):
        trainee.optimizer.load_state_dict(saved)
    expected = Trainee(None, make_tiered, two_groups).train(0, 1, 2)
    assert not expected.differs(trainee)
    assert not expected.train(3, 4, 5).differs(trainee.train(3, 4, 5))


class Poison(list):  # type: ignore[type-arg]
    """Cannot be copied by loading."""

    def __init__(self, values: Any = ()) -> None:
        if values:
            raise RuntimeError("poison")


def test_a_load_that_fails_in_the_middle_has_to_be_made_again(
    device: str, place: Place, make_tiered: MakeTiered
) -> None:
    trainee = Trainee(place, make_tiered, bucket_bytes=1).train(0, 1, 2, missing=False)
    saved = trainee.save()
    poisoned = on_cpu(saved.state_dict)
    poisoned["state"][3]["exp_avg"] = Poison()
    with pytest.raises(RuntimeError, match="poison"):
        trainee.optimizer.load_state_dict(poisoned)
    for use in (trainee.optimizer.step, trainee.optimizer.state_dict):
        with pytest.raises(InterruptedStep, match="a load of AdamW ended when 3 of 5 buckets had been loaded"):
            use()
    trainee.resume(saved).train(3, 4, 5)
    expected = Trainee(None, make_tiered).train(0, 1, 2, missing=False).train(3, 4, 5)
    assert not expected.differs(trainee)


def test_loading_makes_good_an_interrupted_step(device: str, place: Place, make_tiered: MakeTiered) -> None:
    class Failing(torch.optim.AdamW):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails and any(param.ndim == 0 for group in self.param_groups for param in group["params"]):
                super().step(closure)
                raise RuntimeError("out of luck")
            return super().step(closure)

    trainee = Trainee(place, make_tiered, Failing, bucket_bytes=1).train(0, 1, 2, missing=False)
    saved = trainee.save()
    Failing.fails = True
    with pytest.raises(InterruptedStep):
        trainee.train(3, missing=False)
    Failing.fails = False
    with pytest.raises(InterruptedStep):
        trainee.optimizer.state_dict()
    trainee.resume(saved).settle().train(3, 4, 5)
    expected = Trainee(None, make_tiered, "adamw").train(0, 1, 2, missing=False).train(3, 4, 5)
    assert not expected.differs(trainee)


@pytest.mark.parametrize("early", [False, True], ids=["of the tiered one", "of the other before"])
def test_hooks_are_called_once_with_the_tiered_optimizer(device: str, early: bool, make_tiered: MakeTiered) -> None:
    """What they return takes the place of the state_dict, as in torch."""
    plain = torch.optim.AdamW(make_params(device))
    calls: list[tuple[str, Optimizer]] = []

    def register(optimizer: Optimizer) -> None:
        optimizer.register_state_dict_pre_hook(lambda optimizer: calls.append(("before saving", optimizer)))
        optimizer.register_state_dict_post_hook(after_saving)
        optimizer.register_load_state_dict_pre_hook(before_loading)
        optimizer.register_load_state_dict_post_hook(lambda optimizer: calls.append(("loaded", optimizer)))

    def after_saving(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append(("saved", optimizer))
        return {"packed": state_dict}

    def before_loading(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append(("before loading", optimizer))
        packed: dict[str, Any] = state_dict["packed"]
        packed["param_groups"][0]["lr"] = 0.25
        return packed

    if early:
        register(plain)
    optimizer = make_tiered(plain, bucket_bytes=1)
    if not early:
        register(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert [name for name, _ in calls] == ["before saving", "saved", "before loading", "loaded"]
    assert all(of is optimizer for _, of in calls)
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups is plain.param_groups


@pytest.mark.schedules("eager", why="the memory of a copy that is not through yet is not free yet")
def test_neither_saving_nor_loading_takes_much_device_memory(
    device: str, device_module: Any, place: Place, make_tiered: MakeTiered
) -> None:
    """A bucket of 16, and something for what torch rounds up."""
    bucket, slack = MIB // 2, 16 * KIB
    params = make_params(device, shapes=[(64 * KIB,)] * 16)  # each has half a MiB of states
    optimizer = make_tiered(torch.optim.AdamW(params), residency=place.residency, bucket_bytes=2 * bucket)
    train(optimizer, params, range(2), missing=False)
    if place.offloaded:
        optimizer.states.offload()

    def taken(action: Callable[[], Any]) -> tuple[int, Any]:
        device_module.synchronize()
        device_module.reset_peak_memory_stats()
        before = device_module.memory_allocated()
        result = action()
        return device_module.max_memory_allocated() - before, result

    nbytes, saved = taken(optimizer.state_dict)
    assert nbytes == 0
    nbytes, _ = taken(lambda: optimizer.load_state_dict(saved))
    assert bucket <= nbytes <= bucket + slack
    nbytes, _ = taken(lambda: [optimizer.state[param] for param in params])
    assert nbytes == 0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_copied(device: str, copied: Callable[[Any], Any], make_tiered: MakeTiered) -> None:
    optimizer = make_tiered(torch.optim.AdamW(make_params(device)))
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        copied(optimizer)


def half(params: Any) -> Optimizer:
    for param in params:
        param.data = param.data.bfloat16()
    return MasterWeights(params)


class Enveloped(torch.optim.AdamW):
    """Puts its state_dict into one of its own, and looks at all states when it has loaded one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.average = torch.zeros(3, device=self.param_groups[0]["params"][0].device)

    def step(self, closure: Any = None) -> Any:
        self.average += 0  # as a tensor that is not a state, it stays on the device
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict(), "average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["inner"])
        self.average.copy_(state_dict["average"])
        params = [param for group in self.param_groups for param in group["params"]]
        self.oldest = max(int(self.state[param]["step"]) for param in params)
        self.average.add_(self.oldest)


@pytest.mark.parametrize("kind", [half, Enveloped], ids=["master weights", "in an envelope"])
def test_an_optimizer_with_a_format_of_its_own(
    device: str, place: Place, kind: Callable[..., Optimizer], make_tiered: MakeTiered
) -> None:
    saved = Trainee(place, make_tiered, kind).train(0, 1, 2, missing=False).save()
    before = on_cpu(saved.state_dict)
    resumed = Trainee(place, make_tiered, kind).settle().resume(saved).train(3, 4, 5)
    assert not differences(Outcome([], before), Outcome([], saved.state_dict))
    expected = Trainee(None, make_tiered, kind).train(0, 1, 2, missing=False)
    expected = Trainee(None, make_tiered, kind).resume(expected.save()).train(3, 4, 5)
    assert not expected.differs(resumed)


class Counting(torch.optim.SGD):
    """Keeps something in its state that belongs to no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.state["seen"] = {"mean": torch.zeros(4, device=self.param_groups[0]["params"][0].device)}

    def step(self, closure: Any = None) -> Any:
        self.state["seen"]["mean"] = torch.full_like(self.state["seen"]["mean"], self.param_groups[0]["lr"])
        return super().step(closure)


def test_a_state_that_belongs_to_no_parameter(device: str, place: Place, make_tiered: MakeTiered) -> None:
    expected = Trainee(None, make_tiered, Counting).train(0, 1, 2)
    saved = Trainee(place, make_tiered, Counting).train(0, 1, 2).save()
    assert torch.equal(saved.state_dict["state"]["seen"]["mean"], expected.optimizer.state["seen"]["mean"].cpu())
    resumed = Trainee(place, make_tiered, Counting).resume(saved)
    assert "seen" in resumed.optimizer.state
    assert not expected.differs(resumed)
    assert not expected.train(3, 4, 5).differs(resumed.train(3, 4, 5))


def test_states_are_read_by_parameter(device: str, place: Place, make_tiered: MakeTiered) -> None:
    expected = Trainee(None, make_tiered).train(0)
    trainee = Trainee(place, make_tiered)
    assert not trainee.optimizer.state
    trainee.train(0)
    state = trainee.optimizer.state
    with_state = [param for param in trainee.params if param in state]
    assert [index for index, param in enumerate(trainee.params) if param in state] == [1, 2, 3]
    assert len(state) == 3
    assert all(one is other for one, other in zip(state, with_state, strict=True))
    for param, twin in zip(trainee.params, expected.params, strict=True):
        assert state[param].keys() == expected.optimizer.state[twin].keys()
        for key, value in state[param].items():
            assert torch.equal(value, expected.optimizer.state[twin][key].cpu())
    assert trainee.params[0] not in state
    assert state.get(trainee.params[0]) is None
    assert state[trainee.params[0]] == {}
    assert "seen" not in state

    # They are copies, and each look is a new one as soon as they have changed.
    state[with_state[0]]["exp_avg"].fill_(100)
    trainee.optimizer.state[with_state[0]]["exp_avg"].fill_(100)
    expected.train(1, 2, missing=False)
    trainee.train(1, 2, missing=False)
    assert len(state) == 5
    assert torch.equal(
        state[with_state[0]]["exp_avg"], expected.optimizer.state[expected.params[1]]["exp_avg"].cpu()
    )
    assert not expected.differs(trainee)


def test_a_state_is_read_between_backward_and_step(device: str, make_tiered: MakeTiered) -> None:
    """As who logs norms does; it is the step that changes what came early."""
    trainee = Trainee(PLACES[0], make_tiered, bucket_bytes=MIB).train(0, 1, missing=False)
    expected = Trainee(None, make_tiered).train(0, 1, missing=False)
    for _ in range(3):
        backward(trainee)
        backward(expected)
        state = trainee.optimizer.state[trainee.params[0]]
        before = on_cpu(expected.optimizer.state[expected.params[0]])
        trainee.optimizer.step()
        expected.optimizer.step()
        assert all(torch.equal(state[key], before[key]) for key in before)
    assert not expected.differs(trainee)
