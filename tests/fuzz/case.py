"""A case: what one number stands for on one kind of device."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.fuzz.again import answering, draw_again
from tests.fuzz.policies import draw_policy
from tests.fuzz.program import ProgramPlan, draw_program, draw_quirks
from tests.fuzz.scenario import SCENARIOS
from tests.fuzz.tiering import ManagerPlan, draw_manager

# What the library does not do rightly yet, and the fuzz leaves out. Each is drawn all the same, so that the other
# cases stay what they are when one is taken off the list.
NOT_YET = frozenset(
    {
        "buffers in a layer context",  # it does not know the layers, and moves what a batch norm is about to change
    }
)

# What plain torch, or the emulated device, does not do. A kernel that fails there takes the device with it.
UNSUPPORTED = {
    ("cpu", "double_backward"): {"attention", "heads"},
    ("npu", "double_backward"): {"attention", "heads", "pool", "dropout", "write_a_view"},
    ("npu", "part_of_backward"): {"conv1d"},  # under autocast, where the bias alone is to have a gradient
}


@dataclass(frozen=True)
class Case:
    """Wholly determined by its number and the kind of device."""

    number: int
    device: str
    program: ProgramPlan
    scenario: str
    managers: tuple[ManagerPlan, ...]

    def __str__(self) -> str:
        lines = [f"case {self.number} on {self.device}: {self.scenario}", f"  seed {self.program.seed}, "]
        lines[-1] += f"{self.program.rows} x {self.program.width}, autocast {self.program.autocast}, "
        lines[-1] += f"whole numbers in: {self.program.integer_input}"
        for number, layer in enumerate(self.program.layers):
            steps = " ".join(step.name for step in layer.steps)
            quirk = self.program.quirks[number] or "no quirk"
            more = f"inner {layer.inner}, tied {layer.tied}, {quirk}"
            lines.append(f"  layer {number}: {steps} -> {layer.returns}; {more}")
        lines += [f"  {call}" for call in self.program.calls]
        lines += [f"  {manager}" for manager in self.managers]
        return "\n".join(lines)


def draw_case(number: int, device: str, *, calls: int | None = None) -> Case:
    """The case of that number. calls: only so many calls of layers, to make it smaller."""
    rng = random.Random(f"case {number}")
    scenario = rng.choice([*SCENARIOS])
    program = draw_program(
        rng,
        leave_out=UNSUPPORTED.get((device, scenario), set()),
        # A reentrant checkpoint does not go with autograd.grad.
        reentrant=scenario not in ("double_backward", "part_of_backward"),
        # The emulated device has none, and a layer with a backward hook takes none.
        sparse=device == "cpu" and scenario != "failing_backward",
    )
    buffers = any(step.name == "batch_norm" for layer in program.layers for step in layer.steps)
    managers = []
    for _ in range(rng.choices((1, 2), (4, 1))[0]):
        policy, make = draw_policy(rng, len(program.layers))
        plan = draw_manager(rng, policy, make)
        known = plan.layered and buffers and "buffers in a layer context" in NOT_YET
        managers.append(replace(plan, layered=False) if known else plan)
    # Drawn last, so that all else of a case is what it was before these were drawn.
    for place, plan in enumerate(managers):
        again, seed = draw_again(rng, alone=len(managers) == 1), rng.randrange(1 << 30)
        managers[place] = replace(plan, make_policy=answering(plan.make_policy, again, seed), again=again)
    program = replace(program, quirks=draw_quirks(rng, len(program.layers)))
    return Case(number, device, program.cut(calls), scenario, tuple(managers))
