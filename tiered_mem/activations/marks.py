"""A user's marks on the memory of a tensor: it stays on the device, or it moves as a whole.

A mark lies on the storage. So it holds for every view of it, for the copies of the handle that autograd makes, and
for as long as the memory lives, without a list of tensors anywhere.
"""

from __future__ import annotations

import torch

# The attribute that a storage has which stays.
STAYS = "_tiered_mem_stays"
_WHOLE = "_tiered_mem_whole"


def mark_stays(tensor: torch.Tensor) -> None:
    """The tensor's storage stays on the device, where it has not begun to leave it."""
    setattr(tensor.untyped_storage(), STAYS, True)


def mark_whole(tensor: torch.Tensor) -> None:
    """The tensor's storage moves as a whole, however little of it a saved view covers."""
    setattr(tensor.untyped_storage(), _WHOLE, True)


def stays(storage: torch.UntypedStorage) -> bool:
    return hasattr(storage, STAYS)


def moves_whole(storage: torch.UntypedStorage) -> bool:
    return hasattr(storage, _WHOLE)
