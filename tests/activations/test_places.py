"""What a policy reads of where blocks are, and what is taken for a policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.fuzz.policies import HostilePolicy
from tests.models import small_stack
from tests.spilling import MIB, Training
from tiered_mem import PolicyError, TieringManager
from tiered_mem.policies import Action, Event, HostPressure, LayerBegin, LayerEnd, Offload, Policy, Release, Saved
from tiered_mem.policies.places import ON_DEVICE, Place


class Reading(Policy):
    """Answers anything, and looks in each call whether what is on the device adds up."""

    def __init__(self, seed: int) -> None:
        self._answers = HostilePolicy(seed, [4, 4, 2, 2, 3, 2], 0.7)
        self.looks = 0
        self.seen: set[Place] = set()

    def decide(self, event: Event) -> Sequence[Action]:
        blocks = self.places.by_key.values()
        self.seen |= {block.place for block in blocks}
        assert self.places.resident == sum(block.nbytes for block in blocks if block.place in ON_DEVICE)
        self.looks += 1
        return self._answers.decide(event)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_on_the_device_adds_up_whatever_is_answered(seed: int, device: str, tmp_path: Path) -> None:
    policy, training = Reading(seed), Training(device)
    with TieringManager(policy=policy, device=device, host_bytes=4 * MIB, spill_dir=tmp_path) as manager:
        for _ in range(2):
            assert training.step(manager)
        manager.stats()
        assert policy.places.resident == 0
        assert not policy.places.by_key
    assert policy.looks > 20
    assert policy.seen >= {Place.DEVICE, Place.LEAVING, Place.HOST}


class KeepLargest(Policy):
    """As docs/policies.md has it: offloads what is below a size, and releases it when the layer has ended."""

    def __init__(self, below: int) -> None:
        self._below = below
        self._small: list[int] = []
        self.places_in_backward: list[Place] = []

    def decide(self, event: Event) -> Sequence[Action]:
        match event:
            case Saved(_, _, blocks):
                self._small += [key for key, nbytes in blocks if nbytes < self._below]
            case LayerEnd():
                small, self._small = self._small, []
                return [action(key) for action in (Offload, Release) for key in small]
            case LayerBegin(backward=True) if not self.places_in_backward:
                self.places_in_backward = [block.place for block in self.places.by_key.values()]
        return ()


def test_a_policy_of_ones_own_reads_what_has_happened(device: str) -> None:
    model, x = small_stack(2, device)
    for host_bytes, place in (("16MiB", Place.HOST), ("4KiB", Place.DEVICE)):  # in which nothing finds room
        policy = KeepLargest(1 << 40)
        with TieringManager(policy=policy, device=device, host_bytes=host_bytes) as manager:
            with manager.offload_context(model.layers, min_bytes=1024):
                loss = model(x)
            loss.backward()
        assert place in policy.places_in_backward
        assert (Place.DEVICE in policy.places_in_backward) == (place is Place.DEVICE)


def test_a_block_that_was_changed_in_place_is_stuck_on_the_device(device: str) -> None:
    policy = KeepLargest(1 << 40)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Sigmoid()).to(device)
    with TieringManager(policy=policy, device=device, host_bytes="16MiB") as manager:
        with manager.offload_context([layer], min_bytes=1):
            y = layer(torch.ones(64, 64, device=device, requires_grad=True))
            kept = dict(policy.places.by_key)
            y.detach().zero_()
        stuck = {key for key, block in policy.places.by_key.items() if block.stuck}
        assert all(policy.places.by_key[key].place is Place.DEVICE for key in stuck)
        assert kept
        del y


class Plain:
    """Has what is asked of a policy at least, and derives from nothing."""

    def __init__(self) -> None:
        self.told: list[Event] = []

    def check(self, num_layers: int) -> None:
        if num_layers != 2:
            raise ValueError("made for two layers")

    def decide(self, event: Event) -> list[Action]:
        self.told.append(event)
        return []


class Asking(Plain):
    asks = (HostPressure,)


def test_an_object_that_checks_and_decides_is_a_policy(device: str) -> None:
    policy = Plain()
    model, x = small_stack(2, device)
    with TieringManager(policy=policy, device=device, host_bytes="16MiB") as manager:
        with manager.offload_context(model.layers, min_bytes=1024):
            model(x).sum().backward()
        with pytest.raises(ValueError, match="two layers"):
            manager.offload_context(model.layers[:1])
        assert "Plain makes no plans" in str(manager.report())
    assert {type(event) for event in policy.told} >= {Saved, LayerEnd}


def test_one_that_has_more_of_a_policy_must_derive_from_it(device: str) -> None:
    with pytest.raises(TypeError, match=r"Asking has asks, .* derive it from that"):
        TieringManager(policy=Asking(), device=device, host_bytes="16MiB")


def test_errors_name_the_users_own_class(device: str) -> None:
    class Confused(Plain):
        def decide(self, event: Event) -> list[Action]:
            return ["offload"] if isinstance(event, LayerEnd) else []  # type: ignore[list-item]

    model, x = small_stack(2, device)
    with (
        TieringManager(policy=Confused(), device=device, host_bytes="16MiB") as manager,
        manager.offload_context(model.layers, min_bytes=1024),
        pytest.raises(PolicyError, match="Confused answered 'offload'"),
    ):
        model(x)
