"""A policy's answers are advice: the worst cost time, or are refused before anything has changed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.models import eventually, is_empty
from tests.spilling import MIB, Training, files_in
from tiered_mem import PolicyError, TieringManager
from tiered_mem.policies import (
    Action,
    Dropped,
    Each,
    Event,
    HostPressure,
    LayerBegin,
    LayerEnd,
    Offload,
    Release,
    Saved,
    Spill,
)

KINDS = get_args(Action)


class Answers:
    """Sends all that is saved to the host at the end of each layer, and answers one kind of event as the test says.

    keys: what was saved so far.
    """

    def __init__(self, to: type[Any], answer: Callable[[Answers], Any]) -> None:
        self._to = to
        self._answer = answer
        self.keys: list[int] = []

    def check(self, num_layers: int) -> None:
        """Any number suits."""

    def decide(self, event: Event) -> Any:
        if isinstance(event, Saved):
            self.keys.extend(key for key, _ in event.blocks)
        if isinstance(event, self._to):
            return self._answer(self)
        if isinstance(event, LayerEnd):
            return [kind(key) for kind in (Offload, Release) for key in self.keys]
        return []


@pytest.fixture
def manager_of(device: str, tmp_path: Path) -> Iterator[Callable[[Answers], TieringManager]]:
    """Makes managers with room for a fifth of what is saved, in which nothing may be left at the end."""
    managers: list[TieringManager] = []

    def make(policy: Answers) -> TieringManager:
        managers.append(
            TieringManager(
                policy=policy, device=device, host_bytes=4 * MIB, spill_dir=tmp_path, spill_bytes=256 * MIB
            )
        )
        return managers[-1]

    yield make
    for manager in managers:
        assert eventually(lambda manager=manager: is_empty(manager)), manager.stats()
        manager.close()
    assert files_in(tmp_path) == []


def twice(policy: Answers) -> list[Any]:
    return [Spill(key) for key in policy.keys + policy.keys]


def mixed(policy: Answers) -> list[Any]:
    chosen = [kind(key) for kind in KINDS for key in (*policy.keys, *policy.keys, -1, 10**30)]
    random.Random(len(policy.keys)).shuffle(chosen)
    return chosen


def unknown(policy: Answers) -> list[Any]:
    return [Spill(next(UNKNOWN)) for _ in range(3)]


def two_steps(training: Training, manager: TieringManager) -> None:
    for _ in range(2):
        training.step(manager)


def each(policy: Answers) -> Each:
    return Each(Spill, [*policy.keys, *policy.keys, -1, 10**30])


UNKNOWN = itertools.count(10**6)  # never the same advice again


@pytest.mark.parametrize(
    "answer", [twice, mixed, unknown, each, lambda policy: iter(twice(policy)), lambda policy: None]
)
@pytest.mark.parametrize("to", [HostPressure, Dropped, LayerBegin])
def test_duplicates_and_unknown_keys_cost_time_and_nothing_else(
    to: type[Event],
    answer: Callable[[Answers], Any],
    training: Training,
    manager_of: Callable[[Answers], TieringManager],
) -> None:
    manager = manager_of(Answers(to, answer))
    for _ in range(2):
        assert training.step(manager)


GARBAGE: dict[str, Callable[[Answers], Any]] = {
    "no sequence": lambda policy: 5,
    "a string": lambda policy: "spill everything",
    "an action by itself": lambda policy: Spill(0),
    "a list in the list": lambda policy: [*twice(policy), [Spill(0)]],
    "no action": lambda policy: [*twice(policy), None],
    "an event": lambda policy: [HostPressure(1)],
    "the class": lambda policy: [Spill],
    "a key that is a list": lambda policy: [*twice(policy), Spill([1])],  # type: ignore[arg-type]
    "a key that is a tensor": lambda policy: [Spill(torch.ones(3))],  # type: ignore[arg-type]
    "each of what is no action": lambda policy: Each(HostPressure, policy.keys or [0]),  # type: ignore[arg-type]
    "each with a key that is text": lambda policy: Each(Spill, [*policy.keys, "0"]),  # type: ignore[list-item]
    "a key that is text": lambda policy: [Release("0"), Spill("0")],  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("to", [HostPressure, Saved, LayerEnd, Dropped])
def test_garbage_is_refused_and_the_training_goes_on(
    kind: str, to: type[Event], training: Training, manager_of: Callable[[Answers], TieringManager], no_gc: None
) -> None:
    policy = Answers(to, GARBAGE[kind])
    manager = manager_of(policy)
    with pytest.raises(PolicyError, match="Answers answered"):
        two_steps(training, manager)
    training.model.zero_grad()
    policy._answer = lambda policy: []
    assert training.step(manager)


class _Failed(Exception):
    """What a policy raises."""


def fails(policy: Answers) -> list[Any]:
    raise _Failed


@pytest.mark.parametrize("to", [HostPressure, Saved, LayerEnd, Dropped])
def test_what_a_policy_raises_reaches_the_user_and_nothing_is_lost(
    to: type[Event], training: Training, manager_of: Callable[[Answers], TieringManager], no_gc: None
) -> None:
    policy = Answers(to, fails)
    manager = manager_of(policy)
    with pytest.raises(_Failed):
        two_steps(training, manager)
    training.model.zero_grad()
    policy._answer = lambda policy: []
    assert training.step(manager)
