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

    Args:
        key: Names it.
        nbytes: Its size.

    Attributes:
        place: Where it is.
        sinking: It is to go on to disk, or is being written.
        rising: It was on disk, and is to be on the host before it is needed.
        stuck: It was to leave, and its bytes cannot be copied.
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

    Attributes:
        by_key: All of them, in the order in which they were first saved.
        find: Gives the block of a key, or None for one that is gone.
        resident: The bytes of those that are on the device.
    """

    def __init__(self) -> None:
        self.by_key: dict[int, B] = {}
        self.find = self.by_key.get
        self.resident = 0

    @property
    def away(self) -> int:
        """The bytes of those that take memory anywhere but on the device, those on their ways among them."""
        return sum(block.nbytes for block in self.by_key.values() if block.place is not Place.DEVICE)

    def add(self, block: B) -> None:
        """Adds a new block.

        Args:
            block: It is on the device.
        """
        self.by_key[block.key] = block
        self.resident += block.nbytes

    def move(self, block: B, to: Place) -> None:
        """Notes that a block has moved. Where many do at once, `resident` may be written with all of them.

        Args:
            block: The block.
            to: Where it is now.
        """
        self.resident += block.nbytes * ((to in ON_DEVICE) - (block.place in ON_DEVICE))
        block.place = to

    def remove(self, block: B) -> None:
        """Takes a block out.

        Args:
            block: Nobody needs it any more.
        """
        self.move(block, Place.GONE)
        del self.by_key[block.key]

    def on_disk(self, keys: Collection[int]) -> list[int]:
        """Finds the blocks that are on disk, or on their way there.

        Args:
            keys: Of the blocks to look at.

        Returns:
            The keys of those, in the same order.
        """
        return [key for key in keys if (block := self.find(key)) is not None and block.below_host]
