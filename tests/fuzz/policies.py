"""Random policies: ours with random arguments, and one whose answers are any."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

import torch

from tiered_mem.policies import (
    Action,
    Dropped,
    Event,
    LayerOrderPolicy,
    Link,
    LRUPolicy,
    ManualPolicy,
    PlannedPolicy,
    Policy,
    Saved,
    SynchronizationDictPolicy,
)
from tiered_mem.policies.planning import BudgetTooSmall

ACTIONS: tuple[Callable[[int], Action], ...] = get_args(Action)


class HostilePolicy:
    """Answers valid actions for blocks that are, that were and that never will be.

    weights: how often each kind of action is answered. busy: the probability that there is an answer at all.
    """

    def __init__(self, seed: int, weights: Sequence[float], busy: float) -> None:
        self._rng = random.Random(seed)
        self._weights = weights
        self._busy = busy
        self._known: list[int] = []
        self._dead: list[int] = []

    def check(self, num_layers: int) -> None:
        """Suits every model."""

    def decide(self, event: Event) -> Sequence[Action]:
        if isinstance(event, Saved):
            self._known += [key for key, _ in event.blocks if key not in self._known]
        elif isinstance(event, Dropped):
            self._known = [key for key in self._known if key not in event.keys]
            self._dead = [*self._dead, *event.keys][-20:]
        if self._rng.random() > self._busy:
            return ()
        answers = [self._any() for _ in range(self._rng.randint(1, 8))]
        if self._rng.random() < 0.3:
            answers += answers
        return answers

    def _any(self) -> Action:
        kind = self._rng.choices(ACTIONS, self._weights)[0]
        pool = self._rng.choices((self._known, self._dead, range(-2, 200)), (20, 1, 1))[0]
        return kind(self._rng.choice(pool) if pool else 0)


class AnyBudgetPolicy(PlannedPolicy):
    """A PlannedPolicy with so many bytes beside what is allocated now. That they are too few is no error."""

    def __init__(self, nbytes: int, slowdown: float | None) -> None:
        found = torch.accelerator.current_accelerator()
        allocated = 0 if found is None else torch.get_device_module(found).memory_allocated()
        super().__init__(allocated + nbytes, Link(10e9, 10e9), slowdown=slowdown)

    def decide(self, event: Event) -> Sequence[Action]:
        try:
            return super().decide(event)
        except BudgetTooSmall:
            return ()


def draw_policy(rng: random.Random, num_layers: int) -> tuple[str, Callable[[], Policy]]:
    """A policy that suits so many layers: what it is, and what makes one like it."""
    seed = rng.randrange(1 << 30)
    if seed % 4 == 0:
        nbytes = 1 << rng.randint(12, 21)
        slowdown = rng.choice((None, None, 0.5))
        return f"AnyBudgetPolicy({nbytes}, {slowdown})", lambda: AnyBudgetPolicy(nbytes, slowdown)
    match rng.choices(("layer order", "lru", "dictionary", "manual", "hostile"), (4, 4, 2, 1, 5))[0]:
        case "layer order":
            count = rng.choice((None, rng.randint(0, num_layers)))
            in_flight = rng.choice((0, 0, 1, 2))
            return (
                f"LayerOrderPolicy({count}, in_flight={in_flight})",
                partial(LayerOrderPolicy, count, in_flight=in_flight),
            )
        case "lru":
            budget = 1 << rng.randint(6, 19)
            read_ahead = rng.choice((None, 1, budget // 3 + 1, budget))
            return f"LRUPolicy({budget}, read_ahead={read_ahead})", lambda: LRUPolicy(budget, read_ahead=read_ahead)
        case "dictionary":
            schedule, order = draw_dictionary(rng, num_layers)
            told = order if rng.random() < 0.5 else None
            return (
                f"SynchronizationDictPolicy({schedule}, order={told})",
                lambda: SynchronizationDictPolicy(schedule, order=told),
            )
        case "manual":
            return "ManualPolicy()", ManualPolicy
    weights, busy = [rng.random() for _ in ACTIONS], rng.choice((0.1, 0.5, 1.0))
    rounded = [round(weight, 2) for weight in weights]
    return (
        f"HostilePolicy({seed}, {rounded}, {busy})",
        lambda: HostilePolicy(seed, weights, busy),
    )


def draw_dictionary(
    rng: random.Random, num_layers: int
) -> tuple[dict[int, tuple[bool, int, bool, int]], list[str]]:
    """A schedule that must be accepted, and an order of forwards and backwards that it fits."""
    order: list[tuple[bool, int]] = [(True, layer) for layer in range(num_layers)]
    backwards = list(range(num_layers - 1, -1, -1))
    if rng.random() < 0.5:
        rng.shuffle(backwards)
    if rng.random() < 0.5:
        order += [(False, layer) for layer in backwards]
    else:
        for layer in backwards:
            order.insert(rng.randint(order.index((True, layer)) + 1, len(order)), (False, layer))
    schedule = {}
    for layer in range(num_layers):
        moments = range(order.index((True, layer)) + 1, order.index((False, layer)) + 1)
        if rng.random() < 0.7 and len(moments) >= 2:
            release, reload = sorted(rng.sample(moments, 2))
            schedule[layer] = (*order[release], *order[reload])
    return schedule, [f"{'F' if forward else 'B'}{layer}" for forward, layer in order]
