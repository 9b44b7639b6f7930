"""A training that is run to be planned: how many steps it makes, and what is known of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.policies.planned import gpt
from tests.policies.simulated.machine import Machine
from tests.policies.simulated.random_steps import LINK, MIB
from tests.policies.simulated.steps import budget_between, profile
from tiered_mem.choose_policy import Rehearsal
from tiered_mem.policies import Event
from tiered_mem.policies.base import StepEnd
from tiered_mem.rehearsal import MOST, RehearsalOver, Wish

pytestmark = pytest.mark.once(why="it needs no device")

STEP = gpt(layers=3)
STATES = 8 * MIB


class Script(Machine):
    """Trains in a rehearsal. coming: of each step, the bytes of optimizer states that come to stay in it."""

    def __init__(self, folder: Path, steps: int, coming: Callable[[int], int] = lambda step: 0) -> None:
        budget = budget_between(profile(STEP), 0.9)
        self.file = folder / "found.json"
        self.waits = 0
        policy = Rehearsal(Wish(steps, budget, self.file), self._count, budget, LINK)
        super().__init__(policy, LINK)
        self._states = policy.states
        self._coming = coming

    def make(self, steps: int) -> dict[str, Any]:
        """What is found after some steps."""
        for _ in range(steps):
            self.run(STEP)
        return self.found()

    def make_all(self) -> dict[str, Any]:
        with pytest.raises(RehearsalOver) as ending:
            self.make(100)
        assert ending.value.code == 0
        return self.found()

    def found(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.file.read_text())
        return found

    def request(self, event: Event) -> None:
        if isinstance(event, StepEnd) and (coming := self._coming(event.step)):
            self._states.total = STATES
            self._states.kept += coming
        super().request(event)

    def _count(self) -> None:
        self.waits += 1


def test_it_ends_the_script_when_its_steps_are_made(tmp_path: Path) -> None:
    script = Script(tmp_path, steps=4)
    found = script.make_all()
    assert found["steps"] == script.waits == 4
    assert found["missing"] == found["problem"] == ""
    assert found["report"]["step"] == 3


def test_what_is_missing_is_known_at_any_time(tmp_path: Path) -> None:
    script = Script(tmp_path, steps=4)
    assert script.found()["missing"].startswith("no forward ran in the contexts of its manager")
    assert script.make(1)["missing"].startswith("no step that goes by a plan was measured")
    assert script.make(1)["missing"] == ""


def test_it_goes_on_until_optimizer_states_rest(tmp_path: Path) -> None:
    script = Script(tmp_path, steps=3, coming=lambda step: MIB if step < 6 else 0)
    found = script.make_all()
    assert found["missing"] == ""
    assert found["report"]["step"] == found["steps"] - 1 >= 6


def test_states_that_never_rest_are_told_of(tmp_path: Path) -> None:
    script = Script(tmp_path, steps=3, coming=lambda step: 1)
    found = script.make_all()
    assert found["steps"] == MOST * 3
    assert (
        found["missing"]
        == "optimizer states came to the device or left it in all of them: 12 B of 8.0 MiB are there"
    )
