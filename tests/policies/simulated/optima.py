"""python -m tests.policies.simulated.optima: solves small steps exactly, and writes optima.json.

Needs scipy, whose solver is HiGHS, and takes two minutes. The tests need neither.

A mixed integer program. Of each block and each position there is one binary for "its memory is given up here" and
one for "its reload begins here"; the times at which positions come and copies end are continuous. Copies of a
direction run one after another, those out in the order of the saves and those back in the order of the uses.
Positions without time between them are one, with what is dropped there gone before, so that the optimum is a little
below what a plan can reach.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from tests.policies.simulated.random_steps import LINK, small_nested, small_pipeline
from tests.policies.simulated.steps import budget_between, profile
from tiered_mem.policies.planning import Link, Profile

STORED = Path(__file__).with_suffix(".json")
SHARES = (0.5, 0.25, 0.1)
SECONDS = 60.0  # for each program
GIB = float(1 << 30)

Terms = Sequence[tuple[int, float]]


def main() -> None:
    found = []
    for kind, make, seeds in (("nested", small_nested, range(40)), ("pipeline", small_pipeline, range(15))):
        for seed in seeds:
            step = profile(make(seed))
            share = SHARES[seed % len(SHARES)]
            seconds = optimum(step, budget_between(step, share), LINK)
            found.append(
                {"kind": kind, "seed": seed, "share": share, "compute": sum(step.seconds), "optimum": seconds}
            )
            STORED.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")


def optimum(step: Profile, budget: int, link: Link) -> float:
    """The seconds of the fastest plan that keeps the budget. Raises RuntimeError where the solver gives up."""
    return _Program(step, budget, link).solve()


class _Program:
    def __init__(self, step: Profile, budget: int, link: Link) -> None:
        self.seconds, self.full, place = _merged(step)
        self.nbytes = step.nbytes
        self.saved, self.used, self.dropped = (
            [place[k] for k in positions] for positions in (step.saved, step.used, step.dropped)
        )
        self.out = [n / link.out + link.latency for n in step.nbytes]
        self.back = [n / link.back + link.latency for n in step.nbytes]
        self.long = sum(self.seconds) + sum(self.out) + sum(self.back)
        self.names: dict[tuple[str, int, int], int] = {}
        self.rows: list[tuple[Terms, float]] = []
        blocks = range(len(self.nbytes))
        for b in blocks:
            for k in range(self.saved[b], self.used[b]):
                self.name("release", b, k)
                self.name("reload", b, k + 1)
        self.binaries = len(self.names)
        self.moves(blocks)
        self.memory(budget)
        self.copies_out(blocks)
        self.copies_back(blocks)

    def solve(self) -> float:
        cost = np.zeros(len(self.names))
        cost[self.time(len(self.seconds))] = 1
        entries = [(value, row, column) for row, (terms, _) in enumerate(self.rows) for column, value in terms]
        values, rows, columns = zip(*entries, strict=True)
        matrix = csr_matrix((values, (rows, columns)), shape=(len(self.rows), len(self.names)))
        kind = np.zeros(len(self.names))
        kind[: self.binaries] = 1
        most = np.where(kind == 1, 1.0, 10 * self.long)
        constraint = LinearConstraint(matrix, np.array([least for _, least in self.rows]), np.inf)
        options = {"time_limit": SECONDS, "mip_rel_gap": 1e-4}
        found = milp(cost, constraints=constraint, integrality=kind, bounds=Bounds(0, most), options=options)
        if found.status != 0:
            raise RuntimeError(f"not solved in {SECONDS} s: {found.message}")
        return float(found.fun)

    def moves(self, blocks: Sequence[int]) -> None:
        """A block leaves at most once, and then comes back, later."""
        for b in blocks:
            leaves, returns = self.released(b, self.used[b]), self.reloaded(b, self.used[b])
            self.at_least(times(leaves, -1), -1)
            self.at_least([*returns, *times(leaves, -1)], 0)
            self.at_least([*leaves, *times(returns, -1)], 0)
            for k in range(self.saved[b] + 1, self.used[b] + 1):
                self.at_least([*self.released(b, k - 1), (self.name("reload", b, k), -1.0)], 0)

    def memory(self, budget: int) -> None:
        for k, (seconds, full) in enumerate(zip(self.seconds, self.full, strict=True)):
            self.at_least([(self.time(k + 1), 1.0), (self.time(k), -1.0)], seconds)
            if full > budget:
                terms: list[tuple[int, float]] = []
                for b, nbytes in enumerate(self.nbytes):
                    if self.saved[b] <= k < self.dropped[b]:
                        terms += times(self.released(b, k), nbytes / GIB)
                        terms += times(self.reloaded(b, k), -nbytes / GIB)
                self.at_least(terms, (full - budget) / GIB)

    def copies_out(self, blocks: Sequence[int]) -> None:
        before = None
        for b in sorted(blocks, key=self.saved.__getitem__):
            end = self.name("out", b, 0)
            takes = times(self.released(b, self.used[b]), -self.out[b])
            self.after_arrival(end, takes, self.saved[b], 0)
            if before is not None:
                self.at_least([(end, 1.0), (before, -1.0), *takes], 0)
            before = end
            for k in range(self.saved[b], self.used[b]):
                late = self.name("release", b, k), -self.long
                self.at_least([(self.time(k), 1.0), (end, -1.0), late], -self.long)

    def copies_back(self, blocks: Sequence[int]) -> None:
        before = None
        for b in sorted(blocks, key=self.used.__getitem__):
            end = self.name("back", b, 0)
            takes = times(self.reloaded(b, self.used[b]), -self.back[b])
            for k in range(self.saved[b] + 1, self.used[b] + 1):
                late = self.name("reload", b, k), -self.back[b] - self.long
                self.after_arrival(end, [late], k, -self.long)
            if before is not None:
                self.at_least([(end, 1.0), (before, -1.0), *takes], 0)
            before = end
            leaves = times(self.reloaded(b, self.used[b]), -self.long)
            self.at_least([(self.time(self.used[b]), 1.0), (end, -1.0), *leaves], -self.long)

    def after_arrival(self, end: int, terms: Terms, k: int, least: float) -> None:
        """`end` comes after the host has arrived at position k, before what is waited for there."""
        if k == 0:
            self.at_least([(end, 1.0), *terms], least)
        else:
            self.at_least([(end, 1.0), (self.time(k - 1), -1.0), *terms], least + self.seconds[k - 1])

    def at_least(self, terms: Terms, least: float) -> None:
        self.rows.append((terms, least))

    def released(self, b: int, until: int) -> Terms:
        """The variables of a release at `until` or before."""
        last = min(until, self.used[b] - 1)
        return [(self.name("release", b, k), 1.0) for k in range(self.saved[b], last + 1)]

    def reloaded(self, b: int, until: int) -> Terms:
        last = min(until, self.used[b])
        return [(self.name("reload", b, k), 1.0) for k in range(self.saved[b] + 1, last + 1)]

    def time(self, k: int) -> int:
        """When work goes on at position k, after what is waited for there."""
        return self.name("time", k, 0)

    def name(self, kind: str, b: int, k: int) -> int:
        return self.names.setdefault((kind, b, k), len(self.names))


def times(terms: Terms, factor: float) -> Terms:
    return [(variable, value * factor) for variable, value in terms]


def _merged(step: Profile) -> tuple[list[float], list[int], list[int]]:
    """Seconds and memory, if nothing leaves, of the positions with time between them; and the place of each."""
    place = [0]
    for seconds in step.seconds:
        place.append(place[-1] + (seconds > 0))
    count = place[len(step.seconds) - 1] + 1
    seconds, unmovable, change = [0.0] * count, [0] * count, defaultdict[int, int](int)
    for k, each in enumerate(step.seconds):
        seconds[place[k]] += each
        unmovable[place[k]] = max(unmovable[place[k]], step.unmovable[k])
    for nbytes, saved, dropped in zip(step.nbytes, step.saved, step.dropped, strict=True):
        change[place[saved]] += nbytes
        change[place[dropped]] -= nbytes
    alive = np.cumsum([change[k] for k in range(count)])
    return seconds, [int(n) for n in alive + np.array(unmovable)], place


if __name__ == "__main__":
    main()
