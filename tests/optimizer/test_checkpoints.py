"""A tiered optimizer's state_dict is that of an optimizer of torch, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.conftest import KIND
from tests.optimizer.conftest import MakeTiered
from tests.optimizer.strange_optimizers import MasterWeights
from tests.optimizer.trainee import Trainee
from tests.optimizer.training import PLACES, Outcome, Place, differences, make_params, on_cpu

pytestmark = [
    pytest.mark.once(why="what a checkpoint holds is the same in each schedule"),
    pytest.mark.detector_only(why="takes long"),
]

DEVICES = list(dict.fromkeys((KIND, "cpu")))
KINDS = ("adamw-amsgrad", "adam-fused", "sgd-momentum", "adafactor", "nadam")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)


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
