"""What moves between host memory and the disk, and what rests there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..host_tier import HostSlot, Lease
from ..spill.disk_record import Record
from ..spill.io_queue import Job
from ..transfer import Ticket
from .block import Block, Move, Shared


class Member(NamedTuple):
    """A block of a file operation, the slot that it is written from or read into, and what keeps that meanwhile."""

    block: Block
    slot: HostSlot
    lease: Lease


@dataclass(slots=True, eq=False)
class Write(Move):
    """Blocks that go into one record, once the copies to the host have ended that fill their slots."""

    members: list[Member]
    nbytes: int
    copies: list[Ticket]
    record: Record | None = None


@dataclass(slots=True, eq=False)
class Read(Move):
    """Blocks that come back from one record."""

    members: list[Member]
    job: Job
    shared: Shared
