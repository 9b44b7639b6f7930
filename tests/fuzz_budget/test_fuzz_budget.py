"""The short form of the fuzz: some of its cases, and whether it finds what is broken on purpose."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import EMULATED
from tests.fuzz_budget.case import RESIDENCIES, draw_case
from tests.fuzz_budget.run import Verdict, again, run_case
from tests.fuzz_budget.watched import Watch
from tests.fuzz_budget.witness import Witness
from tiered_mem import TieringManager
from tiered_mem.policies import PlannedPolicy

pytestmark = pytest.mark.skipif(not EMULATED, reason="it trains on the emulated NPU")

NUMBERS = (38, 75)


def groups(verdict: Verdict) -> set[str]:
    assert verdict.left_out is None
    return {finding.group.partition(",")[0] for finding in verdict.findings}


@pytest.mark.parametrize("number", NUMBERS)
def test_some_cases_are_right(number: int) -> None:
    verdict = run_case(number)
    assert verdict.findings == ()
    assert verdict.tiered is not None
    assert verdict.tiered.moved


def test_a_number_is_a_case() -> None:
    assert draw_case(7) == draw_case(7)
    drawn = [draw_case(number) for number in range(300)]
    assert {case.optimizer.residency for case in drawn} == set(RESIDENCIES)
    assert {step.kind for case in drawn for step in case.steps} == {
        "plain",
        "accumulate",
        "retain",
        "penalty",
        "two",
    }
    sizes = [case.model.nbytes for case in drawn]
    assert min(sizes) < 4 << 10
    assert max(sizes) > 32 << 20


def test_it_says_how_to_run_a_case_again(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "python -m ascend_emulator --dry -m tests.fuzz_budget --seed 1 --programs=9"
    monkeypatch.setattr("sys.orig_argv", words.split())
    assert again(7) == "python -m ascend_emulator --dry -m tests.fuzz_budget --case 7"


def test_a_peak_that_others_begin_anew_is_not_lost() -> None:
    with Witness() as witness:
        watch = Watch(witness)
        with watch.step("plain"), watch.part("training"):
            before = torch.npu.memory_allocated()
            torch.empty(1 << 20, dtype=torch.uint8, device="npu")
            torch.npu.reset_peak_memory_stats()
    (step,) = watch.steps
    assert step.told == before
    assert 0 <= step.peak - before - (1 << 20) <= 512


def test_a_policy_that_takes_more_than_it_was_given_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PlannedPolicy.__init__

    def wrong(policy: PlannedPolicy, budget: int, *arguments: object, **options: object) -> None:
        right(policy, 4 * budget, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(PlannedPolicy, "__init__", wrong)
    assert groups(run_case(NUMBERS[0])) >= {"above in silence", "report: budget"}


def test_a_report_that_fails_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TieringManager, "report", lambda manager: 1 / 0)
    assert groups(run_case(NUMBERS[0])) == {"report() raises ZeroDivisionError"}
