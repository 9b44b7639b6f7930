"""One manager's share of bytes that all managers of a job take from one limit on one machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import TierFull
from ..sizes import format_bytes
from .node_file import LASTING, PID, WANTS, NodeFile

# The numbers of a record beside those that the file itself has: which rank's it is, and how many that knows of.
# Four from VERDICT on are what node_verdicts.py has there.
_WHO, _RANKS, VERDICT = 1, 2, 12
# Of each kind of bytes there are four more.
_LIMIT, _FLOOR, _WANT, _TAKEN = range(4)
# What nobody else can take is this part of an equal share.
_FLOOR_PART = 4
# How many of those that have most are named in an error.
_NAMED = 4
# Processes without the number of a rank have numbers above all ranks.
_NO_RANK = 1 << 32

_log = logging.getLogger("tiered_mem.tiers")


@dataclass(frozen=True, slots=True)
class SharedKind:
    """A kind of bytes. tier: of which it is. argument: says how many there are. at: its numbers in a record."""

    tier: str
    argument: str
    at: int


HOST = SharedKind("host", "node_bytes", 4)
SPILL = SharedKind("disk", "node_spill_bytes", 8)
# What was written stays written, whoever dies.
WRITES = SharedKind("disk", "node_spill_write_budget", LASTING - _TAKEN)


class NodeShare:
    """What one manager has of one kind of bytes, of which all managers of the job have up to a limit together.

    Each has a floor: as much of the limit is there for it, whether it has taken it or not. A floor is kept for each
    rank that has not come yet, or has died, too. All else is for whoever takes it. Nobody waits.

    nbytes: the limit. Where another manager says another one the smaller counts, with a warning.
    most: what this manager may come to want. now: all of that is its floor.

    Raises TierFull where `now` is for more than there is.
    """

    def __init__(
        self, file: NodeFile, kind: SharedKind, nbytes: int, ranks: int, *, most: int, now: bool = False
    ) -> None:
        self._file = file
        self._kind = kind
        self._own = file.place + kind.at
        self._looked = False
        numbers = file.numbers
        self._before = numbers[self._own + _TAKEN]  # by another manager that had the record
        with file.exclusive():
            numbers[file.place + _RANKS] = ranks
            numbers[self._own + _LIMIT] = nbytes
            living = file.living()
            free, said = self._free(living), self._limit(living)
            if now and most > free:
                error = self.full(most)
                numbers[self._own + _LIMIT] = 0
                raise error
            if kind is not WRITES:
                numbers[self._own + _FLOOR] = most if now else max(0, min(most, _floor(nbytes, ranks), free))
            self._seen = numbers[WANTS]
        if said != nbytes:
            _log.warning(
                "%s is %s in this process, and %s in another of this machine: the smaller one counts",
                *(kind.argument, format_bytes(nbytes), format_bytes(said)),
            )

    @property
    def floor(self) -> int:
        """The bytes that nobody else can take."""
        return 0 if self._file.closed else self._file.numbers[self._own + _FLOOR]

    @property
    def taken(self) -> int:
        """The bytes that this manager has."""
        return 0 if self._file.closed else self._file.numbers[self._own + _TAKEN] - self._before

    @property
    def limit(self) -> int:
        """The bytes that all have together at most."""
        return 0 if self._file.closed else self._limit(self._file.known())

    def take(self, nbytes: int) -> bool:
        """Takes so many bytes, or nothing. A refusal is known to the others at their next step."""
        if self._file.closed or (self._looked and nbytes > self.free()):
            return False
        numbers = self._file.numbers
        with self._file.exclusive():
            if nbytes > self._free(self._file.known()) and nbytes > self._free(self._file.living()):
                self._looked = True
                if self._kind is HOST:
                    numbers[self._own + _WANT] = nbytes
                    numbers[WANTS] += 1
                    self._seen = numbers[WANTS]
                return False
            numbers[self._own + _TAKEN] += nbytes
            numbers[self._own + _WANT] = 0
            return True

    def give(self, nbytes: int) -> None:
        """Gives bytes back that were taken. The memory is free already. It takes no lock of other processes."""
        if not self._file.closed:
            self._file.numbers[self._own + _TAKEN] -= nbytes

    def free(self) -> int:
        """The bytes that this manager could take now. What the dead had may be missing."""
        return 0 if self._file.closed else max(0, self._free(self._file.known()))

    def counted_on(self) -> int:
        """The bytes that this manager has, and an equal part of what is free, so that all may plan with theirs."""
        return max(self.floor, self.taken + self.free() // max(1, self.ranks()))

    def look(self) -> None:
        """Looks who is alive, so that what follows is exact."""
        self._file.look()

    def used(self) -> int:
        """The bytes that all have together. What the dead had may be among them."""
        numbers, taken = self._file.numbers, self._kind.at + _TAKEN
        return sum(numbers[place + taken] for place in self._counted(self._sharing()))

    def ranks(self) -> int:
        """How many ranks share this."""
        return len({self._file.numbers[place + _WHO] for place in self._sharing()})

    def begin_step(self) -> int:
        """The bytes that others were refused since the last call; 0 if none were.

        What this one was refused before may be there now: whoever died meanwhile is looked for again.
        """
        self._looked = False
        if self._file.closed or self._seen == self._file.numbers[WANTS]:
            return 0
        numbers = self._file.numbers
        self._seen = numbers[WANTS]
        places = [place + self._kind.at for place in self._file.known()]
        return sum(numbers[place + _WANT] for place in places if place != self._own)

    def full(self, needed: int, used: int | None = None) -> TierFull:
        """The error for a lack of room, with who has how much. used: of what this one has taken; None is all."""
        return _full(self, self._kind, needed, used)

    def advice(self) -> str:
        """Who has what, and what can be done."""
        if self._kind is WRITES:
            return (
                f"of the {format_bytes(self.limit)} that the ranks of this machine may write, "
                f"{format_bytes(self.used())} are spent; raise {WRITES.argument} if the drive may wear more"
            )
        having = sorted(self._taken_by().items(), key=lambda each: -each[1])
        said = [f"{who} has {format_bytes(nbytes)}" for who, nbytes in having[:_NAMED]]
        if rest := having[_NAMED:]:
            said.append(f"{len(rest)} more have {format_bytes(sum(nbytes for _, nbytes in rest))}")
        share = f"the ranks of this machine share {format_bytes(self.limit)} ({', '.join(said) or 'none has any'})"
        return f"{share}: raise {self._kind.argument}, or offload less"

    def _free(self, places: Sequence[int]) -> int:
        """The bytes that this manager may still take, if these are the records of all managers. Below 0 if less."""
        numbers, at = self._file.numbers, self._kind.at
        limit = self._limit(places)
        if self._kind is WRITES:
            return limit - sum(numbers[place + at + _TAKEN] for place in self._counted(places))
        ranks, held, came = 0, numbers[self._own + _TAKEN], set()
        for place in places:
            if numbers[place + at + _LIMIT]:
                ranks = max(ranks, numbers[place + _RANKS])
                came.add(numbers[place + _WHO])
                if place != self._file.place:
                    held += max(numbers[place + at + _FLOOR], numbers[place + at + _TAKEN])
        return limit - held - max(0, ranks - len(came)) * _floor(limit, ranks)

    def _counted(self, places: Sequence[int]) -> Sequence[int]:
        """The records whose bytes count, if these are those of all managers."""
        return self._file.used() if self._kind is WRITES and not self._file.closed else places

    def _limit(self, places: Sequence[int]) -> int:
        limits = [self._file.numbers[place + self._kind.at + _LIMIT] for place in places]
        return min(limit for limit in limits if limit)

    def _taken_by(self) -> dict[str, int]:
        numbers = self._file.numbers
        had: dict[str, int] = {}
        for place in self._sharing():
            name = named(numbers[place + _WHO], numbers[place + PID])
            had[name] = had.get(name, 0) + numbers[place + self._kind.at + _TAKEN]
        return {name: nbytes for name, nbytes in had.items() if nbytes}

    def _sharing(self) -> list[int]:
        """The records of all that share this."""
        if self._file.closed:
            return []
        return [place for place in self._file.known() if self._file.numbers[place + self._kind.at + _LIMIT]]


class EqualShare:
    """What a rank has where it cannot know of the others: an equal part of the limit, and no more."""

    def __init__(self, kind: SharedKind, nbytes: int, ranks: int) -> None:
        self._kind = kind
        self.limit = self.floor = max(1, nbytes // ranks)
        self.taken = 0

    def take(self, nbytes: int) -> bool:
        """Takes so many bytes, or nothing."""
        if nbytes > self.free():
            return False
        self.taken += nbytes
        return True

    def give(self, nbytes: int) -> None:
        """Gives bytes back that were taken."""
        self.taken -= nbytes

    def free(self) -> int:
        """The bytes that this manager could take now."""
        return self.limit - self.taken

    def counted_on(self) -> int:
        """The bytes that this manager may have."""
        return self.limit

    def used(self) -> int:
        """The bytes that are known to be taken."""
        return self.taken

    def ranks(self) -> int:
        """How many ranks are known of."""
        return 1

    def begin_step(self) -> int:
        """Nobody is known that could want anything."""
        return 0

    def full(self, needed: int, used: int | None = None) -> TierFull:
        """The error for a lack of room. used: of what this one has taken; None is all."""
        return _full(self, self._kind, needed, used)

    def advice(self) -> str:
        """What can be done."""
        return f"each rank of this machine has an equal share: raise {self._kind.argument}, or offload less"


def sign(file: NodeFile, rank: str) -> None:
    """Says in the record whose it is. rank: its number on this machine as text, if it has one."""
    file.numbers[file.place + _WHO] = int(rank) if rank.isdecimal() else _NO_RANK + os.getpid()


def who(file: NodeFile, place: int) -> int:
    """The number of the rank whose record begins there; one above all ranks' where it has none."""
    return file.numbers[place + _WHO]


def named(number: int, process: int) -> str:
    """What people call the owner of a record with this number, whose process is that."""
    return f"process {process}" if number >= _NO_RANK else f"rank {number} (process {process})"


def _full(share: NodeShare | EqualShare, kind: SharedKind, needed: int, used: int | None) -> TierFull:
    used = share.taken if used is None else used
    limit = share.free() + share.taken
    return TierFull(kind.tier, needed=needed, free=limit - used, used=used, limit=limit, advice=share.advice())


def _floor(limit: int, ranks: int) -> int:
    return limit // (_FLOOR_PART * max(1, ranks))
