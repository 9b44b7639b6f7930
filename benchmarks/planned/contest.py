"""Measures one training behind one link: plain, planned, and with each setting of the others."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import ascend_emulator
import torch

from benchmarks.checkpointing import Kept, checkpointed, same_numbers
from benchmarks.peak import Peak
from tiered_mem import TieringManager
from tiered_mem.activations.layers import repeated_blocks
from tiered_mem.policies import LayerOrderPolicy, PlannedPolicy, Policy
from tiered_mem.policies.planning.profile import Link, floor, least_seconds
from tiered_mem.policies.planning.stitching import Ways
from tiered_mem.policies.planning.table import Table

from .loads import alike, fullest
from .lower_bound import least_of_mixtures
from .megatron import MegatronPolicy
from .observed import ObservingPolicy, PlayingPolicy
from .smart_swap import SmartSwap
from .trainings import Training

_HOST_BYTES = "500GiB"
# A training that begins makes its optimizer's states, is recorded and is planned for in the first steps; and if no
# two are alike, it takes some more to know what they are like.
_BEGINNING = 12
_BEGINNING_VARIED = 40
_MOST_IN_FLIGHT = 3
_TRYING = 14  # steps until all ways to treat layers were tried
_AMPLE = 4  # times the peak of the plain step


@dataclass(frozen=True)
class Measured:
    """seconds: a step, the mean of those that count. first: the first step. peak: bytes, the most in any step.

    setting: what was chosen, where there is a choice.
    """

    seconds: float
    peak: int
    first: float
    setting: str = ""


class Contest:
    """make: makes the training anew. link: as the emulator has it."""

    def __init__(self, make: Callable[[], Training], link: Link) -> None:
        gc.collect()
        gc.freeze()
        self._make = make
        self._link = link
        self._used: Training | None = make()
        self._used.step(0)  # which makes the optimizer's states
        self.plain = _steps(self._used)
        observing = ObservingPolicy()
        _of(self._used, observing, beginning=1, ending=1)
        profiles, kinds = observing.profiles, self._used.kinds
        if len(profiles) != 1 + kinds or observing.recording is None or not alike(profiles):
            raise RuntimeError(f"{kinds} plain steps were to be measured, with the same events")
        self._plain_steps = profiles[1:]
        self.profile, self.recording = profiles[-1], observing.recording
        self.layers: int = next(name[2] for name in self.recording.names if name[0] == "begin")
        self.repeatable = same_numbers(repeated_blocks(self._used.model))
        self._ways = [self._treated(self._used, number) for number in range(kinds)]
        self.floor = max(floor(step.moments) for step in self._plain_steps)

    def budget(self, share: float) -> int:
        """So far from the least that a plan can keep to what the plain step takes."""
        return int(self.floor + share * (self.plain.peak - self.floor))

    def bound(self, budget: int) -> float:
        """The mean seconds of a step that no plan within the budget can better."""
        waits = [least_seconds(step.moments, budget, self._link) - step.moments.end for step in self._plain_steps]
        return self.plain.seconds + sum(waits) / len(waits)

    def least(self, budget: int) -> float:
        """The mean seconds of a step that nothing within the budget can better, computing again or moving."""
        waits = [
            least_of_mixtures(ways, budget, self._link) - ways.steps[None].profile.compute
            for ways in self._ways
            if ways is not None
        ]
        return self.plain.seconds + sum(waits) / len(waits) if waits else self.bound(budget)

    def foreseeable(self, budget: int) -> float:
        """The same for plans that cannot know a step's loads beforehand, and leave room for the fullest.

        On a link with latency: none of the copies is faster than that of the largest block.
        """
        largest = max(self.profile.nbytes)
        rates = [largest / (largest / rate + self._link.latency) for rate in (self._link.out, self._link.back)]
        moments = fullest(self._plain_steps).moments
        return self.plain.seconds + least_seconds(moments, budget, Link(*rates)) - moments.end

    def layer_orders(self) -> Iterator[Measured]:
        """All settings: k layers leave, and up to three of them are on their way."""
        for k in range(1, self.layers + 1):
            for in_flight in range(min(k, _MOST_IN_FLIGHT) + 1):
                policy = LayerOrderPolicy(k, in_flight=in_flight)
                yield self.with_policy(policy, f"k={k}, in flight {in_flight}")

    def checkpoints(self, kept: Kept) -> Iterator[Measured]:
        """torch's checkpoint around the first or the last layers, of each number. Not after `auto`."""
        training = self._going_on()
        blocks = repeated_blocks(training.model)
        for k in range(1, len(blocks) + 1):
            for setting, layers in {f"first {k}": blocks[:k], f"last {k}": blocks[-k:]}.items():
                with checkpointed(layers, kept):
                    measured = _steps(training, beginning=0, setting=setting)
                yield measured

    def inputs_moved(self) -> Iterator[Measured]:
        """All settings of `layer_orders` where each layer is checkpointed, so that its inputs are what moves."""
        with checkpointed(repeated_blocks(self._going_on().model), "full"):
            yield from self.layer_orders()

    def megatrons(self) -> Iterator[Measured]:
        """All fractions of the layers but the last."""
        for groups in range(1, self.layers):
            yield self.with_policy(MegatronPolicy(groups), f"{groups} of {self.layers}")

    def smart_swap(self, budget: int) -> Measured:
        names, blocks = self.recording.names, self.recording.profile(self.profile.seconds)[1]
        table = Table(self.profile, SmartSwap(self.profile, names, budget).plan(), None, names, blocks)
        return self.with_policy(PlayingPolicy(table), "")

    def with_policy(self, policy: Policy, setting: str) -> Measured:
        """In a training that goes on, so that the optimizer's states are there. Not after `auto`."""
        return _of(self._going_on(), policy, setting=setting, beginning=0)

    def auto(self, budget: int) -> Measured:
        """In a training that begins."""
        self._used = None  # its memory would count
        beginning = _BEGINNING if len(self._plain_steps) == 1 else _BEGINNING_VARIED
        return _of(self._make(), "auto", budget=budget, beginning=beginning)

    def _treated(self, training: Training, number: int) -> Ways | None:
        """A step with all its layers treated in each way, if they can be."""
        policy = PlannedPolicy(_AMPLE * self.plain.peak, self._link, try_all=True)
        manager = TieringManager(policy=policy, device="npu", host_bytes=_HOST_BYTES, preallocate=False)
        with manager, manager.attach(training.model):
            for _ in range(_TRYING):
                training.step(number)
                torch.npu.synchronize()
            return policy.account.ways

    def _going_on(self) -> Training:
        if self._used is None:
            raise RuntimeError("the training is over")
        return self._used


def _of(
    training: Training,
    policy: Policy | str,
    *,
    beginning: int,
    ending: int = 0,
    budget: int | None = None,
    setting: str = "",
) -> Measured:
    with ExitStack() as stack:
        manager = TieringManager(
            policy=policy, device_budget=budget, device="npu", host_bytes=_HOST_BYTES, preallocate=False
        )
        stack.enter_context(manager)
        stack.enter_context(manager.attach(training.model))
        found = _steps(training, beginning, setting)
        for number in range(training.kinds, training.kinds + ending):
            training.step(number)
    del training
    gc.collect()
    return found


def _steps(training: Training, beginning: int = 1, setting: str = "") -> Measured:
    """Makes steps, each from an idle device to an idle device.

    beginning: of these, how many do not count.
    """
    seconds = []
    peak = 0
    for number in (*range(-beginning, 0), *range(training.kinds)):
        torch.npu.synchronize()
        taken = Peak(torch.npu)
        began = ascend_emulator.now()
        training.step(number)
        torch.npu.synchronize()
        seconds.append(ascend_emulator.now() - began)
        peak = max(peak, taken.read())
    counted = seconds[beginning:]
    return Measured(sum(counted) / len(counted), peak, seconds[0], setting)
