"""A bucket of optimizer states that rests on disk between steps."""

from __future__ import annotations

import torch

from ..tiers import HostSlot
from ..transfer import Ticket
from .home import Home
from .residence import check_content, copied_out, wait_for
from .staging import Staging


class DiskResidence:
    """Bytes that rest in a record of the disk tier, and pass through a slot of `staging`. See `Residence`.

    name: of the bucket, in its records and in errors. Raises ValueError for a bucket that no slot can have.
    """

    def __init__(self, staging: Staging, nbytes: int, name: str) -> None:
        if not 0 < nbytes <= staging.slot_bytes:
            raise ValueError(f"{name} has {nbytes} bytes, and slots of {staging.slot_bytes} are to stage it")
        self._staging = staging
        self._home = Home(name, nbytes)

    @property
    def staging(self) -> Staging:
        return self._staging

    @property
    def released(self) -> bool:
        return self._home.released

    @property
    def nbytes(self) -> int:
        return self._home.nbytes

    def fetch(self) -> None:
        self._staging.fetch(self._home)

    @property
    def ready(self) -> bool:
        return self._staging.ready(self._home)

    def take(self, *, blank: bool = False) -> HostSlot:
        return self._staging.take(self._home, blank=blank)

    @property
    def ticket(self) -> Ticket | None:
        return self._home.filled

    def leave(self, filled: Ticket | None, read: Ticket | None = None) -> None:
        self._staging.leave(self._home, filled, read)

    def release(self) -> None:
        self._staging.release(self._home)

    def copy_out(self) -> torch.Tensor:
        return copied_out(self)

    def copy_in(self, content: torch.Tensor) -> None:
        check_content(content, self._home.nbytes)
        slot = self.take(blank=True)
        try:
            wait_for(self._home.last)
            slot.tensor.copy_(content)
            self._home.newer = True
        finally:
            self.leave(None)
        self._staging.progress()
