"""States are read at any time, whole or by parameter, and that takes no device memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.optimizer.conftest import MakeTiered
from tests.optimizer.trainee import Trainee
from tests.optimizer.training import PLACES, Outcome, Place, differences, make_params, on_cpu, train

pytestmark = [
    pytest.mark.once(why="what a checkpoint holds is the same in each schedule"),
    pytest.mark.detector_only(why="takes long"),
]

KIB = 1 << 10
MIB = 1 << 20


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
