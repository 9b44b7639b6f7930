"""Which policy a manager has: the user's own, one by its name, or the one that is made for the device."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from .device.device import Device
from .errors import TierFull
from .ground.arguments import number, with_methods
from .policies.actions import Advice
from .policies.base import Adapted, Event, Policy, StepBegin, StepEnd, StepMeasured, Used
from .policies.layer_order import LayerOrderPolicy
from .policies.lru import LRUPolicy
from .policies.planned import PlannedPolicy
from .policies.planning.profile import BudgetTooSmall, Link
from .rehearsal import MOST, RehearsalOver, Wish
from .sizes import format_bytes, parse_bytes
from .spill.lower_tier import LowerTier
from .tiers.host_budget import local_processes
from .tiers.measure import measured_link, measured_tier
from .tiers.pinning import pinned_slab

_log = logging.getLogger("tiered_mem.choose_policy")

NAMES = ("auto", "layer-order", "lru")

# Of the device's memory, for what lies in torch's pool in pieces that nobody can use; until a step was recorded.
_FRAGMENTS = 0.04
# torch's pool gives a tensor up to 1 MiB more than it asks for, and not the same each time. Of a budget that a user
# names so much is for that, as policies do not hear of it before the next event.
_ROUNDED = 4 << 20
# Of the device's memory, what policy="lru" keeps there.
_LRU = 0.25
# A link of 50 GB/s takes a third of a millisecond for this, a hundred times its latency.
_MEASURED_BYTES = 16 << 20
# Of ranks that share this machine's memory, for how long each measures: they do not begin at the same moment.
_BESIDE = 0.1
# What goes to each drive of the tier below the host to measure it: less where that is small.
_TIER_BYTES = 32 << 20


class PolicyChoice:
    """What a user says of the policy. Arguments and errors are those of TieringManager."""

    def __init__(
        self,
        policy: Policy | str,
        device_budget: int | str | None,
        slowdown: float | None,
        *,
        recompute: bool = True,
    ) -> None:
        self._device_budget = None if device_budget is None else parse_bytes(device_budget, "device_budget")
        self._slowdown = None if slowdown is None else number("slowdown", slowdown, at_least=0)
        self._recompute = recompute
        if policy != "auto" and (device_budget, slowdown) != (None, None):
            raise ValueError("device_budget and slowdown are for policy='auto'")
        if isinstance(policy, str):
            if policy not in NAMES:
                raise ValueError(f"unknown policy {policy!r}; known are {', '.join(map(repr, NAMES))}")
        else:
            with_methods("policy", policy, ("check", "decide"))
        self._policy = policy if isinstance(policy, (Policy, str)) else Adapted(policy)

    def on(self, device: Device, host_bytes: Callable[[], int | None], disk: LowerTier | None = None) -> Policy:
        """The policy for a device. For "auto" the link is measured, and the drive.

        host_bytes: how much host memory there is, which is asked for at each plan.
        """
        usable, total = device.usable_and_total()
        if isinstance(self._policy, Policy):
            return self._policy
        if self._policy == "layer-order":
            return LayerOrderPolicy()
        if self._policy == "lru":
            return LRUPolicy(int(_LRU * total)) if total else LRUPolicy()
        if total:
            return self._planned(device, usable, total, host_bytes, disk)
        said = (self._device_budget, self._slowdown) != (None, None)
        _log.log(
            logging.WARNING if said else logging.INFO,
            "%s counts no memory that could be planned for: policy='layer-order'%s",
            *(device.kind, ", without the device_budget and slowdown that are given" if said else ""),
        )
        return LayerOrderPolicy()

    def _planned(
        self,
        device: Device,
        usable: int,
        total: int,
        host_bytes: Callable[[], int | None],
        disk: LowerTier | None,
    ) -> Policy:
        rehearsal = Wish.of_environment()
        asked = self._device_budget if rehearsal is None else rehearsal.budget
        budget = usable if asked is None else asked
        if budget > total:
            raise ValueError(
                f"device_budget is {format_bytes(budget)}, and the device has {format_bytes(total)}, of which this "
                f"process can use {format_bytes(usable)}: give at most that, or no device_budget"
            )
        with pinned_slab(device, 2 * _MEASURED_BYTES) as (_, on_host):
            link = measured_link(device, on_host, rounds=3, beside=_BESIDE if local_processes() > 1 else 0.0)
        _log.info(
            "budget %s; the link moves %.1f GB/s to the host and %.1f GB/s back, and %.0f %% of these together",
            *(format_bytes(budget), link.out / 1e9, link.back / 1e9, 100 * link.both),
        )
        make = PlannedPolicy if rehearsal is None else partial(Rehearsal, rehearsal, device.synchronize)
        return make(
            budget,
            replace(link, drive=None if disk is None else _drive(disk)),
            fragments=int(_FRAGMENTS * total),
            beyond=max(0, usable - budget),
            slowdown=self._slowdown,
            host_bytes=host_bytes,
            margin=0 if asked is None else min(_ROUNDED, budget // 16),
            recompute=self._recompute,
        )


def _drive(disk: LowerTier) -> Link | None:
    """None, with a warning, where it cannot be measured."""
    try:
        stats = disk.stats()
        drive = measured_tier(disk, min(_TIER_BYTES * stats.drives, stats.capacity // 8))
    except (TierFull, OSError) as error:
        _log.warning("what goes to disk is not planned, but decided when the host is full: %s", error)
        return None
    _log.info(
        "%s: %.1f GB/s to write, %.1f GB/s to read, and %.0f %% of these at once; an answer takes %.0f us",
        "the drive" if stats.drives == 1 else f"{stats.drives} drives together",
        *(drive.out / 1e9, drive.back / 1e9, 100 * drive.both, 1e6 * drive.latency),
    )
    return drive


class Rehearsal(PlannedPolicy):
    """Measures each step, and ends the script when enough were made.

    These are as many as the wish asks for, and then more, up to MOST times as many, until one was measured that
    went by a plan while all optimizer states rested: one in which some come to the device to stay is not as those
    after it. So it is as long as it is being tried how layers are treated best. The exception comes out of the
    forward that would begin the next step.

    What is known is in a file as JSON before, also where the script ends by itself, or there is no plan. `missing`
    is what is not known yet, in words.

    wait: until the device has done what was queued. A program that never asks the device for a number would else
    be steps ahead of what was measured.
    """

    def __init__(self, wish: Wish, wait: Callable[[], None], budget: int, link: Link, **arguments: Any) -> None:
        super().__init__(budget, link, try_all=wish.records, **arguments)
        self.asks = {*self.asks, StepMeasured}
        self._steps, self._file = wish.steps, wish.file
        self._settled = False  # a step was measured that is as those after it
        self._wait = wait
        self._began: tuple[int | None, ...] = ()
        self._rested = False
        self._found: dict[str, Any] = {"steps": 0, "problem": "", "report": None, "text": ""}
        self._write(
            missing="no forward ran in the contexts of its manager: attach the model, or use offload_context"
        )

    def decide(self, event: Event) -> Sequence[Advice]:
        if isinstance(event, StepBegin):
            self._step_begins(event.step)
        try:
            actions = super().decide(event)
            # What is told together, or not at all, is no position to measure.
            self.asks, self.gather_bytes = {*self.asks, StepMeasured, Used}, 1
        except BudgetTooSmall as error:
            self._write(problem=str(error), missing="", **self._step())
            raise RehearsalOver(0) from None
        if isinstance(event, StepEnd):
            self._rested = self._began == self._resting()
            self._wait()
        elif isinstance(event, StepMeasured):
            self._step_measured()
        return actions

    def _step_begins(self, number: int) -> None:
        if number >= self._steps * (1 if self._settled else MOST):
            raise RehearsalOver(0)
        self._began = self._resting()
        if number == 0:
            self._write(missing="no step was measured: that is done when the next one begins")
        self._write(steps=number + 1)

    def _step_measured(self) -> None:
        report = self.report()
        missing = ""
        if not self._rested:
            there, total = format_bytes(self.states.kept), format_bytes(self.states.total)
            missing = f"optimizer states came to the device or left it in all of them: {there} of {total} are there"
        elif report.step is None:
            missing = "no step that goes by a plan was measured: the first is recorded, those like it are planned"
        self._settled |= not missing and not self.account.undecided
        if self._found["missing"] or not missing:
            self._write(missing=missing, report=report.as_dict(), text=str(report), **self._step())

    def _resting(self) -> tuple[int | None, ...]:
        return self.states.total, self.states.kept, self.states.target

    def _step(self) -> dict[str, Any]:
        """The step that plans are for, if any was measured."""
        try:
            step, names, link = self.account.step()
        except RuntimeError:
            return {}
        ways = self.account.ways
        return {
            "step": asdict(step),
            "names": names,
            "link": asdict(link),
            "states": asdict(self.states),
            "undecided": self.account.undecided,
            "ways": [
                {
                    "how": how,
                    "names": each.names,
                    "blocks": each.blocks,
                    "profile": asdict(each.profile),
                    "treated": None if each.treated is None else [*each.treated],
                }
                for how, each in ({} if ways is None else ways.steps).items()
            ],
        }

    def _write(self, **found: Any) -> None:
        self._found |= found
        partial = self._file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(self._found))
        partial.replace(self._file)  # each process of a training writes it
