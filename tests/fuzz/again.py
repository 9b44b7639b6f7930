"""Random choices of layers that are computed again in backward."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from tiered_mem.policies import Event, LayerBegin, LayerOrderPolicy, Policy, Recompute
from tiered_mem.policies.actions import How, Keep

HOWS: tuple[How, ...] = ("cheap", "full")


@dataclass(frozen=True)
class AgainPlan:
    """How layers are computed again under one manager.

    asked: what the context is asked for. answered: what the policy answers, "any" is drawn for each layer, with
    no answer for some, and with others left to autograd. allowed: of the manager. attached: the model is, in
    place of a context.
    """

    asked: How | None = None
    answered: How | Literal["any"] | None = None
    allowed: str | bool = "auto"
    attached: bool = False


NOTHING_AGAIN = AgainPlan()


def draw_again(rng: random.Random, *, alone: bool) -> AgainPlan:
    """alone: there is no other manager, so that the model may be attached."""
    allowed: str | bool = rng.choices(("auto", "allow", False), (8, 1, 1))[0]
    asked = rng.choices((None, *HOWS), (2, 1, 1))[0]
    answered: Any = rng.choices((None, *HOWS, "any"), (3, 1, 1, 2))[0]
    attached = rng.random() < 0.3
    if rng.random() < 0.2:
        return NOTHING_AGAIN
    return AgainPlan(asked if allowed else None, answered, allowed, attached and alone)


def answering(make: Callable[[], Policy], plan: AgainPlan, seed: int) -> Callable[[], Policy]:
    """What makes the policy, which also answers what the plan says."""
    how = plan.answered
    if how is None:
        return make
    if how != "any" and isinstance(make, partial) and make.func is LayerOrderPolicy:
        return partial(make, recompute=how)

    def made() -> Policy:
        policy = make()
        policy.decide = Answering(policy.decide, (*HOWS, None) if how == "any" else (how,), seed)  # type: ignore[method-assign]
        return policy

    return made


class Answering:
    """Answers as another does, and to the beginning of a layer also how it is to be computed again."""

    def __init__(self, decide: Callable[[Event], Sequence[Any]], hows: Sequence[How | None], seed: int) -> None:
        self._decide = decide
        self._hows = hows
        self._rng = random.Random(seed)

    def __call__(self, event: Event) -> Sequence[Any]:
        answer = self._decide(event)
        if not isinstance(event, LayerBegin) or event.backward:
            return answer
        how = self._rng.choice(self._hows)
        if how is not None:
            return [Recompute(event.layer, how), *answer]
        # Nobody is told of the layers after it, nor of what any of these save.
        return [Keep(event.layer, self._rng.randint(1, 4)), *answer] if self._rng.random() < 0.5 else answer
