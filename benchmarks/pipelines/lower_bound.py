"""What no plan can better in a step of a pipeline, whose ranks wait for one another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from tiered_mem.policies.planning.profile import Link
from tiered_mem.policies.planning.stitching import Way

from .parts import MOMENTS, Layer, in_parts
from .rank_step import Act, RankStep

# Times are in milliseconds and sizes in MiB, so that the solver's tolerances mean something.
_MS, _MIB = 1e3, 1 / (1 << 20)

# Columns with their weights. The column 0 is 1.
Sum = dict[int, float]
Group = tuple[int, bool]  # of blocks: their graph, and whether they have several lives


def least_of_pipeline(
    ranks: Sequence[RankStep], budgets: Sequence[int], links: Sequence[Link], message: float = 0.0
) -> float:
    """The least seconds of a pipeline's step in which blocks move and layers are computed again within budgets.

    It is a bound from below: the optimum of a linear program over all ranks at once. Each rank does what the
    schedule has for it, in that order, and takes at least the time that it took where nothing moved. Columns are
    when each moment of each rank comes; the share of each layer of each microbatch that is treated in each way; and
    how much of what a microbatch has saved was copied to the host by each moment, and is away then.

    - An act begins when the one before it on its rank has ended, and the one whose result it needs.
    - What is copied was saved before. What is away was copied, and has its use still to come; a copy that is there
      from before does for the next time. What nobody uses any more before it is dropped, as most of what the first
      of two parts of a backward has used, does not come back.
    - What would be on the device if nothing left, less what is away, is at most the budget.
    - Between two moments no more is copied in each direction than the link moves meanwhile.

    It leaves out that layers are treated and blocks leave as a whole, the link's latency, and in which order blocks
    of one microbatch come and go. So each plan that is tied to the step's events is a point of it.

    Args:
        ranks: What each rank does.
        budgets: Bytes, of each rank.
        links: Of each rank, between its device and its host.
        message: Seconds at least from the end of an act to the beginning of one on another rank that needs it.

    Raises:
        ValueError: There is no plan that keeps the budgets.
    """
    program = _Program()
    ends = program.column()
    acts: dict[tuple[str, int, int], tuple[int, Sum, Sum]] = {}
    for number, (rank, budget, link) in enumerate(zip(ranks, budgets, links, strict=True)):
        for act, begin, end in _Rank(program, rank, budget, link).acts():
            acts[_name(act)] = number, begin, end
        program.at_least({ends: 1.0}, end)
    stages = 1 + max(stage for _, stage, _ in acts)
    for (kind, stage, batch), (number, begin, _) in acts.items():
        before = _needed(kind, stage, batch, stages)
        if before is not None:
            sender, _, sent = acts[before]
            late = message * _MS if sender != number else 0.0
            program.at_least(begin, sent, late)
    return program.least(ends) / _MS


def _name(act: Act) -> tuple[str, int, int]:
    """An act as others need it: a backward's gradients for the stage before it come from its first part."""
    return "W" if act.kind == "W" else "F" if act.kind == "F" else "B", act.stage, act.batch


def _needed(kind: str, stage: int, batch: int, stages: int) -> tuple[str, int, int] | None:
    """The act whose result another one needs."""
    if kind == "F":
        return ("F", stage - 1, batch) if stage else None
    if kind == "W":
        return "B", stage, batch
    return ("B", stage + 1, batch) if stage < stages - 1 else ("F", stage, batch)


@dataclass
class _Program:
    """Rows and columns of a linear program, of which all columns are at least 0."""

    columns: int = 1
    _entries: list[tuple[int, int, float]] = field(default_factory=list)  # row, column, weight
    _least: list[float] = field(default_factory=list)
    _equal: list[int] = field(default_factory=list)  # rows

    def column(self) -> int:
        self.columns += 1
        return self.columns - 1

    def at_least(self, sum: Sum, other: Mapping[int, float], by: float = 0.0) -> int:
        """One sum is at least another, and this much more. Returns the row."""
        row = len(self._least)
        weights = defaultdict(float, sum)
        for column, weight in other.items():
            weights[column] -= weight
        self._least.append(by - weights.pop(0, 0.0))
        self._entries += [(row, column, weight) for column, weight in weights.items() if weight]
        return row

    def equal(self, sum: Sum, other: Mapping[int, float]) -> None:
        self._equal.append(self.at_least(sum, other))

    def least(self, column: int) -> float:
        rows, columns, weights = zip(*self._entries, strict=True)
        matrix = csr_matrix((weights, (rows, columns)), shape=(len(self._least), self.columns))
        least = np.array(self._least)
        equal = np.zeros(len(least), dtype=bool)
        equal[self._equal] = True
        cost = np.zeros(self.columns)
        cost[column] = 1
        found = linprog(
            cost, -matrix[~equal], -least[~equal], matrix[equal], least[equal], bounds=(0, None), method="highs"
        )
        if found.status != 0:
            raise ValueError(f"no plan keeps the budgets: {found.message}")
        return float(found.fun)


class _Running:
    """A sum that changes from moment to moment, as a column of its own for each value that it takes."""

    def __init__(self, program: _Program) -> None:
        self._program = program
        self.now: Sum = {}

    def add(self, change: Mapping[int, float]) -> None:
        if any(change.values()):
            column = self._program.column()
            weights = defaultdict(float, self.now)
            for each, weight in change.items():
                weights[each] += weight
            self._program.equal({column: 1.0}, weights)
            self.now = {column: 1.0}


class _Group:
    """Blocks of one graph with as many lives: how much of them may be copied, and, of each life, away.

    copied, away: the columns of what was copied by the moment before, and was away then.
    """

    def __init__(self, program: _Program) -> None:
        self.saved = _Running(program)
        self.loose: defaultdict[int, _Running] = defaultdict(lambda: _Running(program))
        self.copied: int | None = None
        self.away: dict[int, int] = {}


@dataclass
class _Changes:
    """By how much more of each group was saved at a moment, and of each life may be away.

    gone: what may have been away and needs not come back. last: the groups that change no more.
    """

    saved: defaultdict[Group, Sum] = field(default_factory=lambda: defaultdict(_sum))
    loose: defaultdict[Group, defaultdict[int, Sum]] = field(default_factory=lambda: defaultdict(_sums))
    gone: defaultdict[Group, defaultdict[int, Sum]] = field(default_factory=lambda: defaultdict(_sums))
    last: set[Group] = field(default_factory=set)


def _sum() -> Sum:
    return defaultdict(float)


def _sums() -> defaultdict[int, Sum]:
    return defaultdict(_sum)


class _Rank:
    """One rank in the program."""

    def __init__(self, program: _Program, rank: RankStep, budget: int, link: Link) -> None:
        self._program = program
        self._step = in_parts(rank)
        self._budget = budget * _MIB
        self._out, self._back = link.out * _MIB / _MS, link.back * _MIB / _MS
        self._beside = 1 / link.both - 1
        self._shares = self._all_shares()
        self._groups: defaultdict[Group, _Group] = defaultdict(lambda: _Group(program))
        self._time: int | None = None

    def acts(self) -> Iterator[tuple[Act, Sum, Sum]]:
        """Each act, when it begins and when it ends."""
        program = self._program
        level = _Running(program)
        level.now = {0: self._step.level * _MIB}
        before: Sum = {}  # the bytes on the device just before a part
        moments = self._changes()
        end: Sum = {}
        for act, parts in self._step.acts:
            begin = program.column()
            program.at_least({begin: 1.0}, end)
            end = {begin: 1.0, 0: (parts[0].lead if parts else act.seconds) * _MS}
            for part in parts:
                shares = self._shares_of(part.layer)
                for i in range(MOMENTS):
                    time = program.column()
                    program.at_least({time: 1.0}, end)
                    full = defaultdict(float, level.now)
                    for way, column in shares.items():
                        full[column] += part.ways[way].moments[i].above * _MIB
                    self._moment(time, [full] if i else [before, full], next(moments))
                    end = {time: 1.0}
                    for way, column in shares.items():
                        end[column] = part.ways[way].moments[i].seconds * _MS
                before = defaultdict(float, level.now)
                for way, column in shares.items():
                    before[column] += part.ways[way].end * _MIB
                level.add({column: part.ways[way].change * _MIB for way, column in shares.items()})
            yield act, {begin: 1.0}, end

    def _all_shares(self) -> dict[Layer, dict[Way, int]]:
        """Of each layer of each graph, the column of each way in which it may go."""
        found: dict[Layer, dict[Way, int]] = {}
        for _, parts in self._step.acts:
            for part in parts:
                if part.layer is not None and part.layer not in found:
                    found[part.layer] = {way: self._program.column() for way in part.ways}
                    self._program.equal(dict.fromkeys(found[part.layer].values(), 1.0), {0: 1.0})
        return found

    def _shares_of(self, layer: Layer | None) -> Mapping[Way, int]:
        return {None: 0} if layer is None or layer not in self._shares else self._shares[layer]

    def _changes(self) -> Iterator[_Changes]:
        found = [_Changes() for _ in range(1 + MOMENTS * sum(len(parts) for _, parts in self._step.acts))]
        for life in self._step.lives:
            column, size = self._shares_of(life.layer)[life.way], life.nbytes * _MIB
            if life.number == 0:
                found[life.saved].saved[life.group][column] += size
            if life.loose < life.used:
                found[life.loose].loose[life.group][life.number][column] += size
                found[life.used].loose[life.group][life.number][column] -= size
                if not life.returns:
                    found[life.used].gone[life.group][life.number][column] += size
        seen: set[Group] = set()
        for change in reversed(found):
            change.last |= {*change.saved, *change.loose} - seen
            seen |= change.last
        return iter(found)

    def _moment(self, time: int, full: Sequence[Sum], change: _Changes) -> None:
        """full: the bytes on the device, if no block leaves, in all of which the budget has to be kept."""
        program = self._program
        out: Sum = {}
        back: Sum = {}
        kept: Sum = {0: self._budget}
        for key in sorted({*self._groups, *change.saved, *change.loose}):
            group = self._groups[key]
            group.saved.add(change.saved.get(key, {}))
            for life, more in change.loose.get(key, {}).items():
                group.loose[life].add(more)
            copied = program.column()
            program.at_least(group.saved.now, {copied: 1.0})
            out[copied] = 1.0
            if group.copied is not None:
                program.at_least({copied: 1.0}, {group.copied: 1.0})
                out[group.copied] = -1.0
            group.copied = copied
            # Each block is in one of its lives.
            away = {life: program.column() for life in group.loose}
            program.at_least({copied: 1.0}, dict.fromkeys(away.values(), 1.0))
            for life, column in away.items():
                program.at_least(group.loose[life].now, {column: 1.0})
                kept[column] = 1.0
                if life in group.away:
                    returned = program.column()
                    gone = change.gone.get(key, {}).get(life, {})
                    program.at_least({returned: 1.0, column: 1.0} | gone, {group.away[life]: 1.0})
                    back[returned] = 1.0
            group.away = away
            if key in change.last:
                del self._groups[key]
        for each in full:
            program.at_least(kept, each)
        passed = {time: 1.0} if self._time is None else {time: 1.0, self._time: -1.0}
        for weight_out, weight_back in ((1.0, self._beside), (self._beside, 1.0)):
            busy = {column: weight * weight_out / self._out for column, weight in out.items()}
            busy |= {column: weight * weight_back / self._back for column, weight in back.items()}
            program.at_least(passed, busy)
        self._time = time
