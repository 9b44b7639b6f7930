"""Runs a case plainly and tiered, and says what came of it."""

from __future__ import annotations

import random
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ascend_emulator
import torch
from torch import Tensor

from tests.fuzz.case import Case
from tests.fuzz.program import Program, ProgramPlan
from tests.fuzz.scenario import SCENARIOS
from tests.fuzz.tiering import Tiered
from tests.fuzz.world import World
from tiered_mem import NotRepeatable

RIGHT, LEFT_OUT, FINDING = "right", "left out", "finding"
ROUNDS = 2


@dataclass(frozen=True)
class Verdict:
    """kind: RIGHT, LEFT_OUT or FINDING. why: in a line. text: all there is to tell. moved: bytes that left."""

    kind: str
    why: str = ""
    text: str = ""
    moved: int = 0


def judge(case: Case, *, races: bool) -> Verdict:
    """Whether tiering changes nothing of the case. races: whether the detector is on."""
    if races:
        ascend_emulator.clear_races()
    try:
        expected, again = _plain(case), _plain(case)
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        return Verdict(LEFT_OUT, f"plain raises {type(error).__name__}: {said[:60]}", traceback.format_exc())
    if difference(expected, again) is not None:
        return Verdict(LEFT_OUT, "plain differs from plain", difference(expected, again) or "")
    if not all(bool(t.isfinite().all()) for t in expected):
        return Verdict(LEFT_OUT, "plain is not finite")
    if races and ascend_emulator.races():
        return Verdict(LEFT_OUT, "plain has races", "\n\n".join(map(str, ascend_emulator.races())))
    found, moved, more = None, 0, ""
    with tempfile.TemporaryDirectory(prefix="tiered_mem_fuzz_") as folder:
        try:
            found, moved = _tiered(case, Path(folder), expected)
        except NotRepeatable as error:
            if not may_be_refused(case.program, case.scenario):
                found, more = f"NotRepeatable: {error}", traceback.format_exc()
        except Exception as error:
            found, more = f"{type(error).__name__}: {error}", traceback.format_exc()
    if races and (raced := ascend_emulator.races()):
        found = f"{len(raced)} races" if found is None else f"{found}; {len(raced)} races"
        more = "\n\n".join([more, *map(str, raced)])
    if found is not None:
        return Verdict(FINDING, found, f"{case}\n{more}", moved)
    return Verdict(RIGHT, moved=moved)


def may_be_refused(program: ProgramPlan, scenario: str) -> bool:
    """Whether a layer has a reason for which it cannot be computed again, of which a step may be told late."""
    names = {step.name for layer in program.layers for step in layer.steps}
    if scenario == "double_backward" and "write_a_view" in names:
        return True  # what that saves is asked for twice in the second backward
    autocast = program.autocast or any(call.autocast for call in program.calls)
    return any(program.quirks) or (autocast and "bilinear" in names)


def _plain(case: Case) -> list[Tensor]:
    program = Program(case.program, case.device)
    return _run(case, World(program, (), random.Random(f"scenario {case.number}")))


def _run(case: Case, world: World) -> list[Tensor]:
    for _ in range(ROUNDS):
        SCENARIOS[case.scenario](world)
    world.see(*world.program.buffers())
    return world.seen


def _tiered(case: Case, folder: Path, expected: Sequence[Tensor]) -> tuple[str | None, int]:
    """What is wrong, and how much has moved."""
    program = Program(case.program, case.device)
    tiered: list[Tiered] = []
    try:
        for number, plan in enumerate(case.managers):
            (folder / str(number)).mkdir()
            acts = random.Random(f"acts {case.number} {number}")
            tiered.append(Tiered(plan, program, folder / str(number), acts))
        found = difference(expected, _run(case, World(program, tiered, random.Random(f"scenario {case.number}"))))
        moved = sum(int(each.manager.stats()["offloaded.bytes.total"]) for each in tiered)
        del program
        wrong = [found, *(each.let_go() for each in tiered)]
        wrong += [each.left_behind() for each in tiered]
        return "; ".join(each for each in wrong if each) or None, moved
    finally:
        for each in tiered:
            each.manager.close()


def difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> str | None:
    """Which of the tensors are not the same bits."""
    if len(expected) != len(found):
        return f"{len(found)} tensors were seen in place of {len(expected)}"
    wrong = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not same_bits(a, b)]
    if not wrong:
        return None
    i = wrong[0]
    where = "" if expected[i].shape != found[i].shape else f", {int((expected[i] != found[i]).sum())} elements"
    return f"{len(wrong)} of {len(expected)} tensors differ, first number {i} of {tuple(expected[i].shape)}{where}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).contiguous().view(torch.uint8), b.reshape(-1).contiguous().view(torch.uint8))
