"""Where blocks are: one ledger, which whoever moves blocks writes and policies read."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import Generic, TypeVar


class Place(Enum):
    """Where a block's bytes are. A block goes round: DEVICE, LEAVING, HOST, ARRIVING, DEVICE.

    From HOST it may go to DISK and back. While it is LEAVING, its bytes may be on disk as well, or already.
    """

    DEVICE = "device"
    LEAVING = "leaving"  # still on the device, a copy to the host is under way or done
    HOST = "host"
    DISK = "disk"  # and nowhere else, though a read may be under way
    ARRIVING = "arriving"  # a copy to the device is under way or done, nobody has waited for it yet
    GONE = "gone"


# In these a block takes memory of the device.
# It is no set: the hash of an Enum is a function in Python.
ON_DEVICE = (Place.DEVICE, Place.LEAVING, Place.ARRIVING)


class Placed:
    """A block, as policies know it.

    key: names it. nbytes: its size. sinking: it is to go on to disk, or is being written. rising: it was on disk,
    and is to be on the host before it is needed. stuck: it was to leave, and its bytes cannot be copied.
    """

    __slots__ = ("key", "nbytes", "place", "rising", "sinking", "stuck")

    def __init__(self, key: int, nbytes: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self.place = Place.DEVICE
        self.sinking = self.rising = self.stuck = False

    @property
    def below_host(self) -> bool:
        """Whether it is on disk, or on its way there."""
        return self.sinking or self.place is Place.DISK


B = TypeVar("B", bound=Placed)


class Places(Generic[B]):
    """The blocks that somebody still needs.

    by_key: all of them, in the order in which they were first saved. find: None for a block that is gone.
    resident: the bytes of those that are on the device.
    """

    def __init__(self) -> None:
        self.by_key: dict[int, B] = {}
        self.find = self.by_key.get
        self.resident = 0

    def add(self, block: B) -> None:
        """A new block is on the device."""
        self.by_key[block.key] = block
        self.resident += block.nbytes

    def move(self, block: B, to: Place) -> None:
        """Where many blocks move at once, `resident` may be written with all of them."""
        self.resident += block.nbytes * ((to in ON_DEVICE) - (block.place in ON_DEVICE))
        block.place = to

    def remove(self, block: B) -> None:
        """Nobody needs it any more."""
        self.move(block, Place.GONE)
        del self.by_key[block.key]

    def on_disk(self, keys: Collection[int]) -> list[int]:
        """Those of the blocks that are on disk, or on their way there."""
        return [key for key in keys if (block := self.find(key)) is not None and block.below_host]
