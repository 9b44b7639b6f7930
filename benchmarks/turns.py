"""Contestants of benchmarks.optimizer_step and benchmarks.overlapped_step step in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from rich.progress import track

from benchmarks.optimizer_contestants import Contestant


class Spent(NamedTuple):
    """What one step took: seconds, of the clock and of all processors; and bytes of the device's memory."""

    wall: float
    cpu: float
    memory: int


def median(spent: Sequence[Spent]) -> float:
    return statistics.median(each.wall for each in spent)


def measure(
    contestants: Sequence[Contestant], device: Any, *, rounds: int, steps: int, seed: int
) -> dict[str, list[Spent]]:
    """What each round's steps took, by the contestant's name. A round before them does not count."""
    random = Random(seed)
    spent: dict[str, list[Spent]] = {each.name: [] for each in contestants}
    for number in track(range(rounds + 1), description="rounds"):
        for each in random.sample(contestants, len(contestants)):
            took = timed(each, device, steps)
            if number:
                spent[each.name].append(took)
    return spent


def timed(contestant: Contestant, device: Any, steps: int) -> Spent:
    """One of so many steps in a row, from an idle device to an idle device."""
    device.synchronize()
    device.reset_peak_memory_stats()
    before = device.memory_allocated()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        contestant.step()
    device.synchronize()
    contestant.wait()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Spent(wall / steps, cpu / steps, device.max_memory_allocated() - before)
