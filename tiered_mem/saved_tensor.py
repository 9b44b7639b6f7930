"""What autograd keeps in place of a saved tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .block import Block, View, origin_of
from .errors import changed_tensor
from .parts import Rebuild

if TYPE_CHECKING:
    from .manager import TieringManager


class SavedTensor:
    """A tensor that was saved: in a block that the manager moves, or on the device, where it stays.

    It is all that backward needs, whatever happened to other forwards since. It needs its block for as long as it
    lives.
    """

    __slots__ = ("__weakref__", "_block", "_manager", "_origin", "_tensor", "_version", "_view", "layer")

    def __init__(self, tensor: torch.Tensor, layer: int | None) -> None:
        """On the device, until it is moved into a block."""
        # A tensor that is not a leaf is kept detached: an operation that saves its own output would otherwise keep
        # itself alive.
        self._tensor: torch.Tensor | None = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version
        self._origin = origin_of(tensor)
        self._block: Block | None = None
        self.layer = layer

    @classmethod
    def in_block(cls, manager: TieringManager, block: Block, view: View, layer: int) -> SavedTensor:
        """In a block that was saved for it."""
        saved = cls.__new__(cls)
        saved._tensor = None
        saved._manager = manager
        saved._block = block
        saved._view = view
        saved.layer = layer
        return saved

    @property
    def moves(self) -> bool:
        """Whether it is in a block."""
        return self._block is not None

    def move_into_block(self, manager: TieringManager, graph: int, layer: int) -> Block | None:
        """Hands the tensor to the manager after all. Not if it was changed: then there is nothing right to keep."""
        tensor = self._tensor
        if tensor is None or tensor._version != self._version:
            return None
        block, view = manager.save(tensor, graph, layer)
        self._manager = manager
        self._block = block
        self._view: View = view._replace(origin=self._origin)
        self._tensor = None
        self.layer = layer
        return block

    def load(self) -> torch.Tensor:
        """The tensor, on the device and ready for work that is issued now on the current stream.

        Raises ChangedTensor, which hooks keep autograd from seeing, or Closed.
        """
        if self._block is not None:
            return self._manager.load(self._block, self._view)
        tensor = self._tensor
        if tensor is None:
            raise RuntimeError("this saved tensor was let go of")
        if tensor._version != self._version:
            raise changed_tensor(tensor.dtype, tensor.shape, self._origin, self._version, tensor._version)
        return tensor

    def __del__(self) -> None:
        if self._block is not None:
            self._manager.let_go(self._block)


class SavedParts:
    """A tensor made of others: each part is saved by itself, and the whole is made of them again."""

    __slots__ = ("_parts", "_rebuild", "layer")

    def __init__(
        self, parts: Sequence[SavedTensor | SavedParts | None], rebuild: Rebuild, layer: int | None
    ) -> None:
        self._parts = parts
        self._rebuild = rebuild
        self.layer = layer

    def load(self) -> torch.Tensor:
        """The tensor, of the type it had."""
        return self._rebuild([None if part is None else part.load() for part in self._parts])
