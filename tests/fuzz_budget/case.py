"""A case: what one number stands for."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.fuzz_budget.models import COSTS, KINDS, ModelPlan
from tiered_mem.policies.actions import How

MIB = 1 << 20
# Of the tensors of one forward, and of all forwards, at most; but two layers, and four steps.
_MOST_OF_A_FORWARD, _MOST = 48 * MIB, 320 * MIB
# Tensors are of so many bytes, as powers of two, each range with its weight.
_SIZES, _WEIGHTS = ((10, 17), (17, 21), (21, 24), (24, 26)), (50, 35, 13, 2)

ENTRIES = ("attach", "context", "method", "eval")
RESIDENCIES = (None, "host", "disk", "auto", "device-until-offload")
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad")


@dataclass(frozen=True)
class StepPlan:
    """One step of the optimizer.

    kind: what is done with the graph, a name in tests.fuzz_budget.training. rows: of the batch, as a share of the
    model's. microbatches: how many gradients are added up. evaluate: rows of a forward without gradients after it,
    0 for none. fails: the layer whose forward fails first, or whose backward, if it is negative; the step is done
    once more then.
    """

    kind: str
    rows: float = 1.0
    microbatches: int = 1
    evaluate: float = 0.0
    fails: int | None = None


@dataclass(frozen=True)
class OptimizerPlan:
    """residency: None for one that is not registered. bucket_bytes: None for the library's own choice."""

    name: str
    foreach: bool
    residency: str | None
    bucket_bytes: int | None
    keeps_gradients: bool


@dataclass(frozen=True)
class ManagerPlan:
    """share: the budget, of the most that the plain run takes. host: what the host tier holds, of that.

    recompute: how layers are computed again, which the model is attached or the context entered with.
    """

    share: float
    host: float
    disk: bool
    slowdown: float | None
    min_bytes: int | None
    entry: str
    recompute: How | None = None


@dataclass(frozen=True)
class Case:
    """Wholly determined by its number.

    second: what a second model is for. ballast: a step, and bytes that the program keeps from there on.
    """

    number: int
    model: ModelPlan
    second: str | None
    optimizer: OptimizerPlan
    manager: ManagerPlan
    steps: tuple[StepPlan, ...]
    ballast: tuple[int, int] | None

    def __str__(self) -> str:
        lines = [f"case {self.number}: {self.model}", f"  second model: {self.second}, ballast: {self.ballast}"]
        lines += [f"  {self.optimizer}", f"  {self.manager}"]
        return "\n".join(lines + [f"  {number}: {step}" for number, step in enumerate(self.steps)])


def draw_case(number: int) -> Case:
    rng = random.Random(f"budget {number}")
    kind = rng.choices(("plain", "accumulate", "retain", "penalty", "two"), (8, 3, 3, 3, 3))[0]
    model = _draw_model(rng)
    steps = _draw_steps(rng, model, kind)
    case = Case(
        number,
        model,
        rng.choices((None, "gan", "teacher"), (8, 1, 1))[0],
        _draw_optimizer(rng),
        _draw_manager(rng),
        steps,
        (rng.randrange(1, len(steps)), rng.choice((1, 4, 16)) * model.nbytes) if rng.random() < 0.08 else None,
    )
    # Drawn last, so that all else of a case is what it was before this was drawn.
    again: How | None = rng.choices((None, "cheap", "full"), (2, 1, 1))[0]
    return replace(case, manager=replace(case.manager, recompute=again))


def _draw_model(rng: random.Random) -> ModelPlan:
    kinds = list(KINDS)
    nbytes = int(2 ** rng.uniform(*rng.choices(_SIZES, _WEIGHTS)[0]))
    width = rng.choice([w for w in (16, 32, 64, 128, 256, 512) if w * w <= max(nbytes, 1 << 10)])
    chosen = [rng.choice(kinds)] * 5 if rng.random() < 0.7 else [rng.choice(kinds) for _ in range(5)]
    most = max(2, min(20, 5 * _MOST_OF_A_FORWARD // (nbytes * sum(COSTS[kind] for kind in chosen))))
    layers = tuple(chosen[i % 5] for i in range(rng.randint(min(most, 3), most)))
    return ModelPlan(
        layers,
        width,
        rows=max(1, nbytes // (4 * width)),
        classes=rng.choice((0, 0, 0, 2 * width, 4 * width)),
        bfloat16=rng.random() < 0.15,
        checkpointed=rng.random() < 0.08,
        seed=rng.randrange(1 << 30),
    )


def _draw_steps(rng: random.Random, model: ModelPlan, kind: str) -> tuple[StepPlan, ...]:
    """One kind of step, as a rule; in one case of four two kinds in turn. Batches are all alike, or not."""
    kinds = [kind, rng.choice(("plain", "accumulate"))] if rng.random() < 0.25 else [kind]
    shape = rng.choices(("alike", "growing", "shrinking", "any"), (6, 1, 1, 2))[0]
    evaluates = rng.choices((0, 2, 3), (6, 1, 1))[0]
    fails = rng.random() < 0.12
    forward = sum(COSTS[kind] for kind in model.layers) * model.nbytes
    count = max(4, min(rng.randint(6, 10), _MOST // (forward * (1 if kind == "plain" else 2))))
    steps = []
    for number in range(count):
        rows = {
            "alike": 1.0,
            "growing": 0.5 + number / count,
            "shrinking": 1.5 - number / count,
            "any": rng.choice((0.25, 0.5, 0.75, 1.0, 1.0, 1.5)),
        }[shape]
        chosen = kinds[number % len(kinds)]
        steps.append(
            StepPlan(
                chosen,
                rows,
                rng.choice((2, 3)) if chosen == "accumulate" else 1,
                rng.choice((0.5, 1.0, 2.0, 4.0)) if evaluates and number % evaluates == 1 else 0.0,
                rng.randrange(-len(model.layers), len(model.layers)) if fails and rng.random() < 0.3 else None,
            )
        )
    return tuple(steps)


def _draw_optimizer(rng: random.Random) -> OptimizerPlan:
    return OptimizerPlan(
        rng.choice(OPTIMIZERS),
        rng.random() < 0.5,
        rng.choice(RESIDENCIES),
        rng.choice((None, None, 1 << 16, 1 << 20)),
        rng.random() < 0.2,
    )


def _draw_manager(rng: random.Random) -> ManagerPlan:
    return ManagerPlan(
        rng.uniform(0.4, 1.1),
        rng.choices((2.0, 0.3, 0.1), (8, 1, 1))[0],
        rng.random() < 0.15,
        rng.choices((None, 0.05), (9, 1))[0],
        rng.choices((None, 1, 4096), (7, 1, 2))[0],
        rng.choices(ENTRIES, (7, 1, 1, 1))[0],
    )
