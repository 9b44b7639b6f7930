"""What policies are told of steps, uses and device memory, if they ask for it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from tests.models import stack
from tiered_mem import TieringManager
from tiered_mem.activations.block import SavedBlocks, held_by_others
from tiered_mem.device.device import Device
from tiered_mem.policies import (
    Action,
    Dropped,
    Event,
    ForwardBegin,
    ForwardEnd,
    LayerBegin,
    LayerEnd,
    LayerOrderPolicy,
    Reload,
    Saved,
)
from tiered_mem.policies.actions import Advice, Recompute
from tiered_mem.policies.base import (
    ExactMemory,
    Memory,
    Recomputed,
    Refused,
    StepBegin,
    StepEnd,
    StepMeasured,
    Used,
)

BESIDE = (Memory, StepMeasured, Refused, Recomputed)


class Listening(LayerOrderPolicy):
    """The schedule of the first layers, and a list of all that was told."""

    def __init__(self, offload: int, asks: Collection[type]) -> None:
        super().__init__(offload)
        self.asks = asks
        self.told: list[Event] = []

    def decide(self, event: Event) -> Sequence[Action]:
        self.told.append(event)
        return () if isinstance(event, (Used, StepBegin, StepEnd, *BESIDE)) else super().decide(event)


class Recomputing(Listening):
    """Has each layer computed again as well."""

    def decide(self, event: Event) -> Sequence[Advice]:
        answer = super().decide(event)
        again = isinstance(event, LayerBegin) and not event.backward
        return [*answer, Recompute(event.layer, "full")] if again else answer


class Passing(torch.nn.Module):
    """Its forward takes 8 MiB for a moment, after all that it saves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch.empty(8 << 20, dtype=torch.uint8, device=x.device)
        return y


def steps_of_passing(policy: Listening, device: str) -> None:
    """Three of them."""
    x = torch.ones(64, device=device, requires_grad=True)
    with TieringManager(policy=policy, device=device, host_bytes="16MiB") as manager:
        for _ in range(3):
            with manager.offload_context([layer := Passing()]):
                y = layer(x)
            y.sum().backward()


def told_in(policy: Listening, device: str, steps: int = 3, **arguments: object) -> list[Event]:
    model, x = stack(3, device)
    with (
        TieringManager(policy=policy, device=device, host_bytes="16MiB", **arguments) as manager,  # type: ignore[arg-type]
        manager.attach(model, min_bytes=1024),
    ):
        for _ in range(steps):
            model(x).backward()
            manager.synchronize()
            if device != "cpu":
                getattr(torch, device).synchronize()
        manager.stats()  # tells of what was dropped last
        told = list(policy.told)
        with torch.no_grad():
            model(x)
        assert policy.told == told
    return told


def dropped(told: list[Event]) -> set[int]:
    return {key for event in told if isinstance(event, Dropped) for key in event.keys}


def test_a_step_lasts_until_the_next_one_begins(device: str) -> None:
    told = told_in(Listening(2, {StepBegin, StepEnd}), device)
    at = [(type(event), event.step) for event in told if isinstance(event, StepBegin | StepEnd)]
    assert at == [(StepBegin, 0), (StepEnd, 0), (StepBegin, 1), (StepEnd, 1), (StepBegin, 2)]
    for event, following in pairwise(told):
        if isinstance(event, StepBegin):
            assert isinstance(following, ForwardBegin)
        if isinstance(event, StepEnd):
            assert isinstance(following, StepBegin)
    assert len({len(step) for step in by_step(told)[:2]}) == 1


def by_step(told: list[Event]) -> list[list[Event]]:
    steps: list[list[Event]] = []
    for event in told:
        if isinstance(event, StepBegin):
            steps.append([])
        elif steps and not isinstance(event, (StepEnd, *BESIDE)):
            steps[-1].append(event)
    return steps


def test_parts_of_a_tensor_are_held_until_nobody_else_has_it(device: str) -> None:
    blocks = SavedBlocks(Device(device))
    parts = list(torch.ones(64, 4096, device=device).split(1024))
    whole = torch.ones(64, 4096, device=device)
    saved = list(dict.fromkeys(blocks.save(tensor)[0] for tensor in (*parts, whole, whole.view(-1))))
    assert held_by_others(saved) == saved
    del whole
    assert held_by_others(saved) == saved[:-1]
    del parts[1:]
    assert held_by_others(saved) == saved[:-1]  # all are of one storage
    parts.clear()
    assert held_by_others(saved) == []


def test_exact_memory_tells_of_the_input_that_a_layer_still_has(device: str) -> None:
    told = told_in(Listening(1, {ExactMemory}), device, steps=2)
    layers = {key: event.layer for event in told if isinstance(event, Saved) for key, _ in event.blocks}
    ends = [i for i, event in enumerate(told) if isinstance(event, ForwardEnd)]
    for memory, event in pairwise(told[ends[0] : ends[1]]):
        held = {layers[key] for key in memory.held} if isinstance(memory, ExactMemory) else set()
        if isinstance(event, Saved):
            assert event.layer in held
        elif isinstance(event, LayerBegin) and not event.backward:
            assert held <= {0, event.layer - 1}  # the caller has the first, and this layer the last one


class AskingLate(Listening):
    """Begins to ask for exact memory when a layer of the first step has ended."""

    def decide(self, event: Event) -> Sequence[Action]:
        if isinstance(event, LayerEnd):
            self.asks = {ExactMemory}
        return super().decide(event)


def test_exact_memory_tells_of_what_was_saved_before_somebody_asked(device: str) -> None:
    told = told_in(AskingLate(1, set()), device, steps=1)
    first = next(event.blocks[0][0] for event in told if isinstance(event, Saved))
    memories = [event for event in told if isinstance(event, ExactMemory)]
    assert memories
    assert all(first in memory.held for memory in memories[:3])  # the caller has it


def test_each_use_is_told_of_the_layer_that_saved_it(device: str) -> None:
    told = told_in(Listening(2, {Used}), device, steps=1)
    saver = {
        key: (event.graph, event.layer) for event in told if isinstance(event, Saved) for key, _ in event.blocks
    }
    used = [event for event in told if isinstance(event, Used)]
    assert {event.key for event in used} == saver.keys()
    assert all((event.graph, event.layer) == saver[event.key] for event in used)
    for event in used:  # before it is dropped, and in its layer's backward
        dropped = next(i for i, other in enumerate(told) if isinstance(other, Dropped) and event.key in other.keys)
        begun = next(
            i
            for i, other in enumerate(told)
            if isinstance(other, LayerBegin) and other.backward and other.layer == event.layer
        )
        assert begun < told.index(event) < dropped


def test_who_asks_for_nothing_is_told_what_it_ever_was(device: str) -> None:
    told = told_in(Listening(2, ()), device)
    known = (ForwardBegin, ForwardEnd, LayerBegin, LayerEnd, Saved)
    assert all(isinstance(event, (*known, Dropped)) for event in told)
    heard = told_in(Listening(2, {Used, Memory, StepBegin, StepEnd}), device)
    assert [event for event in heard if type(event) in known] == [event for event in told if type(event) in known]
    # The news of what was dropped comes before each event, and so in smaller pieces.
    assert dropped(heard) == dropped(told)


def test_memory_is_told_before_each_event(device: str, device_module: ModuleType) -> None:
    told = told_in(Listening(2, {Memory}), device)
    for event, following in pairwise(told):
        assert isinstance(event, Memory) != isinstance(following, Memory)
    memory = [event for event in told if isinstance(event, Memory)]
    assert all(0 < event.device <= event.peak for event in memory)
    assert max(event.peak for event in memory) <= device_module.max_memory_allocated()


def test_a_measured_step_has_the_time_of_each_position(device: str) -> None:
    everything = {Used, Memory, StepBegin, StepEnd, StepMeasured}
    told = told_in(Listening(2, everything), device, steps=4)
    measured = [event for event in told if isinstance(event, StepMeasured)]
    assert [event.step for event in measured[:2]] == [0, 1]
    for event in measured:
        assert len(event.seconds) == len(by_step(told)[event.step])
        assert min(event.seconds) >= 0
        assert sum(event.seconds) > 0
        assert event.stalls >= 0
        if device != "cpu":
            assert event.out > 0
            assert event.back > 0


def test_steps_are_measured_beside_a_trace_of_the_users(device: str) -> None:
    told = told_in(Listening(2, {StepMeasured}), device, trace=True)
    measured = [event for event in told if isinstance(event, StepMeasured)]
    assert len(measured) == 2
    assert all(sum(event.seconds) > 0 for event in measured)


def test_torch_keeps_its_peak_in_steps_that_are_not_recorded(device: str, device_module: ModuleType) -> None:
    device_module.reset_peak_memory_stats()
    large = torch.empty(32 << 20, dtype=torch.uint8, device=device)
    del large
    told_in(Listening(2, {Memory, StepMeasured, StepBegin, StepEnd}), device)
    assert device_module.max_memory_allocated() >= 32 << 20


def test_exact_memory_sees_what_came_and_went(device: str, device_module: ModuleType) -> None:
    """A layer's forward takes 8 MiB for a moment, in each of three steps."""

    policy = Listening(0, {ExactMemory})
    steps_of_passing(policy, device)
    rises = [event.peak - event.device for event in policy.told if type(event) is ExactMemory]
    assert len([rise for rise in rises if 8 << 20 <= rise < 9 << 20]) == 3
    assert {type(event) for event in policy.told if isinstance(event, Memory)} == {Memory, ExactMemory}


def test_exact_memory_sees_what_came_before_word_of_a_layer_that_is_computed_again(device: str) -> None:
    """At which nothing is told of memory."""

    policy = Recomputing(0, {ExactMemory, Recomputed})
    steps_of_passing(policy, device)
    before = [policy.told[k - 2 : k] for k, event in enumerate(policy.told) if isinstance(event, LayerEnd)]
    assert [type(told) for told, _ in before] == [Recomputed] * 3
    memory = [told for _, told in before]
    assert all(type(each) is ExactMemory and 8 << 20 <= each.peak - each.device < 9 << 20 for each in memory[1:])


def test_a_trial_as_full_tells_what_cheap_would_keep_beside_what_the_layer_saves(device: str) -> None:
    """Of three products the second one's result is saved, by the sine. The last one's nobody needs again."""

    class Products(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(torch.tanh(x @ x) @ x) @ x

    policy = Recomputing(0, {Recomputed})
    x = torch.ones(64, 64, device=device, requires_grad=True)
    with (
        TieringManager(policy=policy, device=device, host_bytes="16MiB") as manager,
        manager.offload_context([layer := Products()]),
    ):
        layer(x).sum().backward()
    told = [event for event in policy.told if isinstance(event, Recomputed)]
    assert told == [Recomputed(told[0].graph, 0, True, results=2 * x.nbytes, unsaved=x.nbytes)]


def test_a_step_that_is_recorded_from_its_middle_on_has_times_before_the_next_begins(device: str) -> None:
    class Late(Listening):
        """Asks for all of it when the second step's third layer begins, until the step is over."""

        def decide(self, event: Event) -> Sequence[Action]:
            answer = super().decide(event)
            if isinstance(event, StepBegin):
                self.step = event.step
            elif self.step == 1 and isinstance(event, LayerBegin) and event.layer == 2 and not event.backward:
                self.asks = {StepBegin, StepEnd, StepMeasured, ExactMemory}
            elif isinstance(event, StepEnd):
                self.asks = {StepBegin, StepEnd}
            return answer

    model, x = stack(3, device)
    policy = Late(2, {StepBegin, StepEnd})
    with (
        TieringManager(policy=policy, device=device, host_bytes="16MiB") as manager,
        manager.attach(model, min_bytes=1024),
    ):
        for _ in range(3):
            model(x).backward()
    (measured,) = [place for place, event in enumerate(policy.told) if isinstance(event, StepMeasured)]
    begun = policy.told.index(StepBegin(2))
    assert policy.told.index(StepEnd(1)) < measured < begun
    step = by_step(policy.told)[1]
    event = policy.told[measured]
    assert isinstance(event, StepMeasured)
    third = next(place for place, each in enumerate(step) if isinstance(each, LayerBegin) and each.layer == 2)
    assert len(event.seconds) == len(step) - third - 1
    assert sum(event.seconds) > 0


def test_a_reload_that_finds_the_device_full_is_told(device: str, device_module: Any) -> None:
    class Early(Listening):
        """Wants a block back while nothing is free."""

        rest: ClassVar[list[torch.Tensor]] = []

        def decide(self, event: Event) -> Sequence[Action]:
            answer = super().decide(event)
            if isinstance(event, LayerBegin) and event.backward and event.layer == 2:
                device_module.set_per_process_memory_fraction(1e-4)
                with contextlib.suppress(torch.OutOfMemoryError):
                    while True:
                        self.rest.append(torch.empty(1 << 18, dtype=torch.uint8, device=device))
                return [Reload(self.first)]
            if isinstance(event, Refused):
                self.rest.clear()
                device_module.set_per_process_memory_fraction(1.0)
            return answer

        @property
        def first(self) -> int:
            return next(each for each in self.told if isinstance(each, Saved)).blocks[0][0]

    policy = Early(2, {Refused})
    try:
        told = told_in(policy, device, steps=1)
    finally:
        device_module.set_per_process_memory_fraction(1.0)
    assert [event for event in told if isinstance(event, Refused)] == [Refused(Reload(policy.first))]


def test_a_program_that_keeps_its_graphs_has_steps_that_end(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_mem.activations.driver._MOST_EVENTS", 50)
    model, x = stack(3, device)
    policy = Listening(2, {StepBegin, StepEnd})
    with TieringManager(policy=policy, device=device, host_bytes="16MiB") as manager:
        manager.attach(model, min_bytes=1024)
        kept = [model(x) for _ in range(12)]
        begun = [event for event in policy.told if isinstance(event, StepBegin)]
        assert 2 < len(begun) < 12
        del kept
