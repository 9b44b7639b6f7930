"""Host memory that counts in what the ranks of a machine share."""

from __future__ import annotations

from ..allocators.base import HostMemory, OutOfHostMemory, Region
from .node_share import EqualShare, NodeShare


class NodeMemory:
    """A `HostMemory` that takes the bytes from a share before the source gives them.

    It takes what the source needs for a region, with what that adds. A refusal by the share is OutOfHostMemory, in
    which `free` is what it still has.

    Attributes:
        name: That of the source's class.
    """

    def __init__(self, source: HostMemory, share: NodeShare | EqualShare) -> None:
        self._source = source
        self._share = share
        self.name = type(source).__name__

    def allocate(self, nbytes: int) -> Region:
        """Return a region of the source.

        Args:
            nbytes: Its size.

        Raises:
            OutOfHostMemory: The share or the source does not have that.
            ValueError: `nbytes` is not positive.
            RuntimeError: The source is closed, or fails as its class says.
        """
        taken = self.footprint(nbytes)
        if nbytes > 0 and not self._share.take(taken):
            free, own = self._share.free(), self._share.taken
            reason = "this machine's ranks leave no more"
            raise OutOfHostMemory(reason, self._share.advice(), nbytes, own, free, free, own + free)
        try:
            return self._source.allocate(nbytes)
        except BaseException:
            if nbytes > 0:
                self._share.give(taken)
            raise

    def deallocate(self, region: Region) -> None:
        """Give a region back to the source, and then its bytes to all.

        Args:
            region: As `allocate` returned it.

        Raises:
            ValueError: It is unknown here or was freed already.
        """
        self._source.deallocate(region)
        self._share.give(self.footprint(region.nbytes))

    def footprint(self, nbytes: int) -> int:
        """Return how much memory a region takes, as the source has it.

        Args:
            nbytes: Its size.
        """
        return self._source.footprint(nbytes)

    def close(self) -> None:
        """Close the source.

        Raises:
            RuntimeError: Regions are still allocated.
        """
        self._source.close()
