"""The short form of the fuzz: some of its cases, and whether it finds what is broken on purpose."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch.utils.hooks import RemovableHandle

from tests.conftest import KIND, RACES
from tests.fuzz.case import draw_case
from tests.fuzz.part import Part
from tests.fuzz.processes import Processes
from tests.fuzz.scenario import SCENARIOS
from tests.fuzz.verdict import FINDING, RIGHT, Verdict, judge
from tiered_mem.activations.block import Block, View
from tiered_mem.activations.store import BlockStore
from tiered_mem.device.transfer import Ticket, TransferEngine

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    pytest.mark.filterwarnings("ignore"),  # of torch, about what random programs do
]


NUMBERS = (0, 2, 3, 4, 5)


def judged(number: int, device: str = KIND) -> Verdict:
    return judge(draw_case(number, device), races=RACES)


@pytest.mark.parametrize("device", [KIND] if RACES else sorted({KIND, "cpu"}))
def test_some_cases_are_right(device: str) -> None:
    verdicts = [judged(number, device) for number in NUMBERS]
    assert [verdict.kind for verdict in verdicts] == [RIGHT] * len(NUMBERS), [verdict.text for verdict in verdicts]
    assert any(verdict.moved for verdict in verdicts)


def test_a_number_is_a_case() -> None:
    assert [draw_case(number, KIND) for number in range(50)] == [draw_case(number, KIND) for number in range(50)]
    drawn = [draw_case(number, KIND) for number in range(300)]
    assert {case.scenario for case in drawn} == SCENARIOS.keys()
    assert {case.managers[0].policy.split("(")[0] for case in drawn} >= {
        "AnyBudgetPolicy",
        "LRUPolicy",
        "HostilePolicy",
        "ManualPolicy",
    }


def one_wrong_element(monkeypatch: pytest.MonkeyPatch) -> None:
    right = BlockStore.load

    def wrong(store: BlockStore, block: Block, view: View) -> torch.Tensor:
        tensor = right(store, block, view)
        if not tensor.is_floating_point() or tensor.numel() < 2:
            return tensor
        changed = tensor.clone(memory_format=torch.contiguous_format)
        changed.view(-1)[1] += 0.5
        return changed

    monkeypatch.setattr(BlockStore, "load", wrong)


def blocks_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockStore, "drop", lambda store, block: False)
    monkeypatch.setattr("tests.fuzz.tiering.eventually", lambda condition: condition())  # it never comes


def hooks_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemovableHandle, "remove", lambda handle: None)


def copies_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(engine: TransferEngine, *moves: object) -> None:
        raise RuntimeError("no copy today")

    monkeypatch.setattr(TransferEngine, "offload", fail)


def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ticket, "hold", lambda ticket, stream, why=None: None)


BROKEN = {
    "tensors differ": one_wrong_element,
    "left in the manager": blocks_that_stay,
    "hooks are left": hooks_that_stay,
    "no copy today": copies_that_fail,
}
if RACES:
    BROKEN["races"] = nobody_waits


@pytest.mark.usefixtures("careless")
@pytest.mark.parametrize("words", BROKEN)
def test_what_is_broken_is_found(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one of the first cases, whatever its policy."""
    BROKEN[words](monkeypatch)
    verdicts = (judged(number) for number in NUMBERS)
    found = next((verdict for verdict in verdicts if verdict.kind == FINDING), None)
    assert found is not None
    assert words in found.why


class Told(Part):
    """A part whose workers say what is told here: each is right with one case, and dies within case 7."""

    def command(self, first: int, *arguments: str) -> list[str]:
        lines = [{"case": first, "kind": "begins"}]
        if first != 7:
            lines.append({"case": first, "kind": RIGHT, "why": "", "text": "", "moved": first})
        code = "import sys; print(sys.argv[1]); print('a stack', file=sys.stderr); sys.exit(int(sys.argv[2]))"
        return [sys.executable, "-S", "-c", code, "\n".join(map(json.dumps, lines)), "3" if first == 7 else "0"]


def test_a_process_that_dies_within_a_case_is_a_finding() -> None:
    """And another one goes on with the next case."""
    part = Told("cpu", None)
    processes = Processes(part, 5, 1, [], lambda: None)
    for _ in range(4):
        processes.run(60.0, once=True)
    assert part.kinds == {RIGHT: 3, FINDING: 1}
    assert [(case, text) for case, _, text in part.findings] == [(7, "a stack\n")]
    assert part.again(7) == "python -m tests.fuzz --case 7 --device cpu"
