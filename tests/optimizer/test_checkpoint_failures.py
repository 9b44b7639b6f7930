"""Loads that fail, loads after an interrupted step, and copies, which are refused."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.optimizer.conftest import MakeTiered
from tests.optimizer.trainee import Trainee
from tests.optimizer.training import Place, make_params, on_cpu
from tiered_mem.errors import InterruptedStep

pytestmark = [
    pytest.mark.once(why="what a checkpoint holds is the same in each schedule"),
    pytest.mark.detector_only(why="takes long"),
]


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

    trainee = Trainee(place, make_tiered, Failing, bucket_bytes=1, separable=True).train(0, 1, 2, missing=False)
    saved = trainee.save()
    Failing.fails = True
    in_place = place.residency == "device-until-offload" and not place.offloaded
    with pytest.raises(RuntimeError if in_place else InterruptedStep):
        trainee.train(3, missing=False)
    Failing.fails = False
    # With all states in place it is as without tiering: half a step was made, and nobody says so.
    with contextlib.nullcontext() if in_place else pytest.raises(InterruptedStep):
        trainee.optimizer.state_dict()
    trainee.resume(saved).settle().train(3, 4, 5)
    expected = Trainee(None, make_tiered, "adamw").train(0, 1, 2, missing=False).train(3, 4, 5)
    assert not expected.differs(trainee)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_copied(device: str, copied: Callable[[Any], Any], make_tiered: MakeTiered) -> None:
    optimizer = make_tiered(torch.optim.AdamW(make_params(device)))
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        copied(optimizer)
