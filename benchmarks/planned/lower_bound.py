"""What no mixture of keeping, moving and computing again can better within a budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from tiered_mem.policies.planning.profile import Link
from tiered_mem.policies.planning.stitching import RecordedStep, Ways

# A step is looked at about so often, beside where its parts begin.
_MOMENTS = 400
# The solver ends after so many seconds, or so near to the optimum. What it has by then is a bound from below, too.
_LONGEST, _NEAR = 120, 1e-3
# Times are in milliseconds and sizes in MiB, so that the solver's tolerances mean something.
_MS, _MIB = 1e3, 1 / (1 << 20)

Weights = NDArray[np.float64]


def least_of_mixtures(ways: Ways, budget: int, link: Link) -> float:
    """The least seconds of a step of which each layer is treated in one of the ways, and blocks move.

    It is a bound from below: the optimum of a mixed-integer program in which a layer is treated as a whole, and a
    block may leave in part. The step's parts come in their order, and each in all ways, one after another. Only the
    way in which its layer is treated takes time and memory. At each moment of these:

    - What was copied out was saved before. What is away was saved, and its use is still to come.
    - What would be on the device, if no block left, is at most the budget and what is away.
    - The next moment comes when what lies between them is computed, and no sooner than what is copied between them
      has crossed the link, in each direction.

    It leaves out the link's latency, and that a block is freed only as a whole.

    Raises ValueError where no mixture keeps the budget.
    """
    return _Program(ways, link).optimum(budget)


@dataclass(frozen=True)
class _Moment:
    """Each is a constant, and a weight for each layer and way.

    lasts: the time until the next one. full: what would be on the device then. saved, used: the sizes of the blocks
    that were saved before, and of those that were used by now.
    """

    lasts: Weights
    full: Weights
    saved: Weights
    used: Weights


class _Program:
    """Its columns: 1 for constants, the share of each layer in each way, and for each moment its time, and what was
    copied out and back by then."""

    def __init__(self, ways: Ways, link: Link) -> None:
        self._ways = ways
        self._rates = link.out * _MIB / _MS, link.back * _MIB / _MS
        layers = sorted({of[2] for of in ways.layers if of is not None})
        pairs = [(layer, way) for layer in layers for way in ways.steps]
        self._share = {pair: column for column, pair in enumerate(pairs, 1)}
        self._width = 1 + len(pairs)
        self._moments = list(self._walk())
        self._columns = self._width + 3 * len(self._moments)

    def optimum(self, budget: int) -> float:
        limits = self._limits(budget)
        matrix = lil_array((len(limits), self._columns))
        for n, (weights, columns) in enumerate(limits):
            for column in np.flatnonzero(weights):
                matrix[n, column] = weights[column]
            for column, weight in columns.items():
                matrix[n, column] = weight
        ways = len(self._ways.steps)
        shares = lil_array((len(self._share) // ways, self._columns))
        least, most, whole = np.zeros(self._columns), np.full(self._columns, np.inf), np.zeros(self._columns)
        least[0] = most[0] = 1
        for n, ((layer, way), column) in enumerate(self._share.items()):
            shares[n // ways, column] = whole[column] = 1
            most[column] = way in self._ways.of(layer)
        time, out, _ = self._first
        most[time] = 0
        cost = np.zeros(self._columns)
        cost[: self._width] = self._moments[-1].lasts
        cost[out - 1] = 1  # when the last moment begins
        found = milp(
            cost,
            integrality=whole,
            bounds=Bounds(least, most),
            constraints=[LinearConstraint(matrix.tocsr(), ub=0), LinearConstraint(shares.tocsr(), 1, 1)],
            options={"time_limit": _LONGEST, "mip_rel_gap": _NEAR},
        )
        if found.mip_dual_bound is None or not np.isfinite(found.mip_dual_bound):
            raise ValueError(f"no treatment of the layers keeps a budget of {budget} bytes: {found.message}")
        return float(found.mip_dual_bound) / _MS

    @property
    def _first(self) -> tuple[int, int, int]:
        """The first column of the times, and of what was copied out and back."""
        count = len(self._moments)
        return self._width, self._width + count, self._width + 2 * count

    def _limits(self, budget: int) -> list[tuple[Weights, Mapping[int, float]]]:
        """Of each row its weights for the first columns, and for others. None may come to more than 0."""
        none = np.zeros(self._width)
        time, out, back = self._first
        limits: list[tuple[Weights, Mapping[int, float]]] = []
        for k, moment in enumerate(self._moments):
            over = moment.full.copy()
            over[0] -= budget * _MIB
            limits.append((-moment.saved, {out + k: 1}))
            limits.append((moment.used - moment.saved, {out + k: 1, back + k: -1}))
            limits.append((over, {out + k: -1, back + k: 1}))
            if k:
                limits.append((self._moments[k - 1].lasts, {time + k - 1: 1, time + k: -1}))
                for first, rate in zip((out, back), self._rates, strict=True):
                    copied = {first + k - 1: -1 / rate, first + k: 1 / rate}
                    limits.append((none, {time + k - 1: 1, time + k: -1, **copied}))
                    limits.append((none, {first + k - 1: 1, first + k: -1}))
        return limits

    def _walk(self) -> Iterator[_Moment]:
        level, saved, used = (np.zeros(self._width) for _ in range(3))
        level[0] = self._ways.steps[None].levels[0] * _MIB
        passes = {way: _Pass(step) for way, step in self._ways.steps.items()}
        for part, of in enumerate(self._ways.layers):
            for way, step in passes.items():
                if of is None and way is not None:
                    continue
                column = 0 if of is None else self._share[of[2], way]
                for lasts, full, before, by_now in step.moments(part):
                    moment = _Moment(np.zeros(self._width), level.copy(), saved.copy(), used.copy())
                    for weights, value in zip(
                        (moment.lasts, moment.full, moment.saved, moment.used),
                        (lasts * _MS, full * _MIB, before * _MIB, by_now * _MIB),
                        strict=True,
                    ):
                        weights[column] += value
                    yield moment
                for weights, nbytes in zip((level, saved, used), step.change(part), strict=True):
                    weights[column] += nbytes * _MIB
            for way, step in passes.items():
                for owner, nbytes in step.lent[part].items():
                    used[0 if owner is None else self._share[owner, way]] += nbytes * _MIB


class _Pass:
    """The step in one way.

    lent: in each part, of the blocks of other layers that are used there first, the bytes by layer. They count as
    used when it is over: in a mixture it may go another way.
    """

    def __init__(self, step: RecordedStep) -> None:
        self._step = step
        self._profile = step.profile
        self._grain = step.profile.compute / _MOMENTS
        self._uses: defaultdict[int, list[int]] = defaultdict(list)  # in each part the blocks of its own layer
        self.lent: defaultdict[int, defaultdict[int | None, int]] = defaultdict(lambda: defaultdict(int))
        for part, blocks in enumerate(step.saved):
            owner = step.layers[part]
            for b in blocks:
                user = step.part_of(self._profile.used[b])
                if step.layers[user] is not None and owner is not None and step.layers[user][2] == owner[2]:
                    self._uses[user].append(b)
                else:
                    self.lent[user][None if owner is None else owner[2]] += self._profile.nbytes[b]

    def change(self, part: int) -> tuple[int, int, int]:
        """By which it changes the bytes on the device if no block leaves, those saved, and those used."""
        levels, nbytes = self._step.levels, self._profile.nbytes
        saved, used = (sum(nbytes[b] for b in blocks) for blocks in (self._step.saved[part], self._uses[part]))
        return levels[self._step.cuts[part + 1]] - levels[self._step.cuts[part]], saved, used

    def moments(self, part: int) -> Iterator[tuple[float, int, int, int]]:
        """Where the part begins, and then of each stretch of it where the most is on the device: the seconds until
        the next one; and in bytes how much more is there then than where the part began, if no block leaves, and
        what the part has saved before, and used by then."""
        profile, begin, end = self._profile, self._step.cuts[part], self._step.cuts[part + 1]
        if begin == end:
            return
        picked = [begin]
        since = 0.0
        for k in range(begin + 1, end):
            since += profile.seconds[k - 1]
            if since > self._grain or len(picked) == 1:
                picked.append(k)
                since = 0.0
            elif profile.full[k] > profile.full[picked[-1]]:
                picked[-1] = k
        for k, following in zip(picked, [*picked[1:], end], strict=True):
            saved = sum(profile.nbytes[b] for b in self._step.saved[part] if profile.saved[b] < k)
            used = sum(profile.nbytes[b] for b in self._uses[part] if profile.used[b] <= k)
            yield (
                sum(profile.seconds[k:following]),
                profile.full[k] - self._step.levels[begin],
                saved,
                used,
            )
