"""Where the states of one optimizer rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..tiers import HostTier
from .residence import Exclusive, HostResidence, Residence


class Residences(Protocol):
    """Makes residences for buckets."""

    def make(self, sizes: Sequence[int]) -> list[Residence]:
        """One for each number of bytes. Raises TierFull; then there is none."""

    def progress(self) -> None:
        """Goes on with what can go on. Does not wait."""

    def close(self) -> None:
        """Waits for what is under way. The residences are released before."""


class HostResidences:
    """Host memory, a part for each bucket."""

    def __init__(self, host: HostTier, exclusive: Exclusive) -> None:
        self._host = host
        self._exclusive = exclusive

    def make(self, sizes: Sequence[int]) -> list[Residence]:
        made: list[Residence] = []
        try:
            for nbytes in sizes:
                made.append(HostResidence(self._host, self._exclusive, nbytes))
        except BaseException:
            for residence in made:
                residence.release()
            raise
        return made

    def progress(self) -> None:
        """Nothing is under way but copies."""

    def close(self) -> None:
        """There is nothing to wait for."""
