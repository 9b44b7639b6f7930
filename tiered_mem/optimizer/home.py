"""Where a bucket of optimizer states is, on its ways to disk and back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ..spill.disk_record import Record
from ..spill.io_queue import Job
from ..tiers import HostSlot
from ..transfer import Ticket


class State(Enum):
    """What the slot of a bucket is about.

    AWAY: there is none. FETCHED: a read fills it, or did. TAKEN: somebody uses it. LEAVING: it is to be written, or
    is being written. KEPT: the disk did not take it.
    """

    AWAY = auto()
    FETCHED = auto()
    TAKEN = auto()
    LEAVING = auto()
    KEPT = auto()


@dataclass(slots=True, eq=False)
class Home:
    """A bucket is in `record`, in `slot`, or in both.

    name: in records and in errors. record: complete. newer: the slot has bytes that are in no complete record.
    read, write: what is under way, or has ended and was not noticed yet. filled: the copy that changed the slot.
    last: the copy of the slot that ends after all others.
    """

    name: str
    nbytes: int
    state: State = State.AWAY
    record: Record | None = None
    slot: HostSlot | None = None
    newer: bool = False
    read: Job | None = None
    write: Record | None = None
    filled: Ticket | None = None
    last: Ticket | None = None
    released: bool = False

    @property
    def exists(self) -> bool:
        """Whether there are any bytes."""
        return self.newer or self.record is not None
