"""The ways to train within a budget: each takes some steps, and has the last one's times and the highest peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.checkpointing import Kept, checkpointed
from benchmarks.overlaps import OVERLAPS
from tiered_mem import TieringManager
from tiered_mem.optimizer.registered import Overlap, Residency

from .step import Step, Taken

_HOST_BYTES = "400GiB"
_WARMUP = 1  # in which the optimizer's states come into being


@dataclass(frozen=True)
class Asked:
    """budget: in bytes. steps: of "auto", until it has its plan and goes by it. say: what is being done."""

    model: str
    tokens: int
    budget: int
    steps: int
    say: Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """setting: what was chosen, where there is a choice. report: what the manager says, where it has planned.

    gradients: the most bytes of them at once; None where nobody has looked.
    """

    taken: Taken
    setting: str = ""
    report: str = ""
    gradients: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return self.taken.as_dict() | {
            "setting": self.setting,
            "report": self.report,
            "gradients": self.gradients,
        }


def plain(asked: Asked) -> Found:
    """All on the device, the optimizer's states too."""
    step = Step(asked.model, asked.tokens, None)
    return Found(_last([step.run() for _ in range(_WARMUP + 1)]), gradients=step.gradients())


def plain_but_states(asked: Asked, overlap: Overlap | None) -> Found:
    """All on the device, but for the optimizer's states."""
    with _states_on_host(asked, overlap) as step:
        # The first step with states learns when they are needed.
        return Found(_last([step.run() for _ in range(_WARMUP + 2)]), gradients=step.gradients())


def every_layer(asked: Asked, kept: Kept) -> Found:
    """torch's checkpoint around all layers."""
    with _states_on_host(asked) as step, checkpointed(step.model.layers, kept):
        return Found(_last([step.run() for _ in range(_WARMUP + 1)]))


def best_layers(asked: Asked, kept: Kept) -> Found:
    """torch's checkpoint around as few layers as keep the budget.

    The first ones: what they are computed again with finds the room that the layers after them have left. All
    layers take the same time, so that the fewest are the best.

    Raises ValueError where even all are not enough.
    """
    with _states_on_host(asked) as step:
        layers = list(step.model.layers)

        def trial(k: int) -> Taken:
            asked.say(f"the first {k} layers")
            with checkpointed(layers[:k], kept):
                return step.run()

        with checkpointed(layers, kept):
            for _ in range(_WARMUP):
                step.run()
        best, fewest = trial(len(layers)), len(layers)
        if best.peak > asked.budget:
            raise ValueError(f"at least {best.peak / (1 << 30):.1f} GiB")
        too_few = -1
        while fewest - too_few > 1:
            k = (fewest + too_few) // 2
            if (taken := trial(k)).peak <= asked.budget:
                best, fewest = taken, k
            else:
                too_few = k
        return Found(best, f"first {fewest}")


def planned(
    asked: Asked, recompute: str | bool, residency: Residency = "host", overlap: Overlap | None = None
) -> Found:
    """policy="auto". Raises ValueError where no plan keeps the budget."""
    manager = TieringManager(
        policy="auto",
        device="npu",
        device_budget=asked.budget,
        host_bytes=_HOST_BYTES,
        preallocate=False,
        recompute=recompute,
    )
    with manager:
        step = Step(asked.model, asked.tokens, manager, residency, overlap)
        with manager.attach(step.model):
            taken = []
            for number in range(asked.steps):
                asked.say(f"step {number + 1} of {asked.steps}")
                taken.append(step.run())
            found = Found(_last(taken), report=str(manager.report()))
            return replace(found, gradients=step.gradients())


def _plain_but_states(overlap: Overlap | None) -> Callable[[Asked], Found]:
    return lambda asked: plain_but_states(asked, overlap)


def _planned_beside(overlap: Overlap, residency: Residency) -> Callable[[Asked], Found]:
    return lambda asked: planned(asked, "auto", residency, overlap)


WAYS: dict[str, Callable[[Asked], Found]] = {
    "plain": plain,
    "plain-host": _plain_but_states(None),
    **{f"plain-{overlap}": _plain_but_states(overlap) for overlap in OVERLAPS},
    "full": lambda asked: every_layer(asked, "full"),
    "selective": lambda asked: every_layer(asked, "selective"),
    "full-best": lambda asked: best_layers(asked, "full"),
    "selective-best": lambda asked: best_layers(asked, "selective"),
    "moving": lambda asked: planned(asked, False),
    "auto": lambda asked: planned(asked, "auto"),
    **{f"auto-{overlap}-host": _planned_beside(overlap, "host") for overlap in OVERLAPS},
    **{f"auto-{overlap}": _planned_beside(overlap, "auto") for overlap in OVERLAPS},
}


@contextmanager
def _states_on_host(asked: Asked, overlap: Overlap | None = None) -> Iterator[Step]:
    with TieringManager(policy="layer-order", device="npu", host_bytes=_HOST_BYTES, preallocate=False) as manager:
        yield Step(asked.model, asked.tokens, manager, "host", overlap)


def _last(taken: Sequence[Taken]) -> Taken:
    return replace(taken[-1], peak=max(each.peak for each in taken))
