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
from tests.policies.simulated.treated import Model, decoder
from tiered_mem.choose_policy import Rehearsal
from tiered_mem.cli.sweep import ways_of
from tiered_mem.policies import Event
from tiered_mem.policies.base import StepEnd
from tiered_mem.rehearsal import MOST, VARIABLE, RehearsalOver, Wish

pytestmark = pytest.mark.once(why="it needs no device")

STEP = gpt(layers=3)
STATES = 8 * MIB


class Script(Machine):
    """Trains in a rehearsal. coming: of each step, the bytes of optimizer states that come to stay in it.

    model: whose layers can be computed again; records: all ways are to be known.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        coming: Callable[[int], int] = lambda step: 0,
        *,
        model: Model | None = None,
        share: float = 0.9,
        records: bool = False,
        recompute: bool = True,
    ) -> None:
        self._step = STEP if model is None else model.step()
        self._remade = None if model is None else model.step
        budget = budget_between(profile(self._step), share)
        self.file = folder / "found.json"
        self.waits = 0
        wish = Wish(steps, budget, self.file, records)
        policy = Rehearsal(wish, self._count, budget, LINK, recompute=recompute)
        super().__init__(policy, LINK)
        self._states = policy.states
        self._coming = coming

    def make(self, steps: int) -> dict[str, Any]:
        """What is found after some steps."""
        for _ in range(steps):
            self.run(self._step, remade=self._remade)
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


def test_a_recording_tries_all_ways_though_nothing_waits(tmp_path: Path) -> None:
    script = Script(tmp_path, steps=4, model=decoder(4), share=1.0, records=True)
    found = script.make_all()
    assert 4 < found["steps"] < MOST * 4
    assert (found["missing"], found["undecided"]) == ("", False)
    ways = ways_of(found)
    assert list(ways.steps) == [None, "cheap", "full"]
    model = decoder(4)
    for way, step in ways.steps.items():
        assert step.profile.nbytes == model.recorded(model.all(way)).profile.nbytes
    assert sum(ways.steps[None].profile.seconds) == pytest.approx(sum(found["step"]["seconds"]))


def test_a_try_of_a_plan_tries_no_more_than_it_would(tmp_path: Path) -> None:
    found = Script(tmp_path, steps=4, model=decoder(4), share=1.0).make_all()
    assert (found["steps"], found["ways"]) == (4, [])


def test_a_script_that_ends_before_all_ways_were_tried_has_a_report_all_the_same(tmp_path: Path) -> None:
    script = Script(tmp_path, steps=4, model=decoder(4), share=1.0, records=True)
    found = script.make(6)
    assert (found["missing"], found["undecided"], found["ways"]) == ("", True, [])
    assert list(ways_of(found).steps) == [None]


def test_where_computing_again_is_forbidden_nothing_is_tried(tmp_path: Path) -> None:
    found = Script(tmp_path, steps=4, model=decoder(4), share=0.3, records=True, recompute=False).make_all()
    assert (found["steps"], found["undecided"], found["ways"]) == (4, False, [])


@pytest.mark.parametrize("records", [True, False])
def test_a_wish_is_read_as_it_was_said(records: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = Wish(4, 1 << 30, tmp_path / "a:b", records)
    monkeypatch.setenv(VARIABLE, wish.said())
    assert Wish.of_environment() == wish


@pytest.mark.parametrize("said", ["4", "4:100:file", "4:100:watch:file", "four:100:try:file"])
def test_a_wish_that_cannot_be_read_is_refused(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, said)
    with pytest.raises(ValueError, match="is not STEPS:BUDGET:record:FILE or STEPS:BUDGET:try:FILE"):
        Wish.of_environment()
