"""What autograd keeps in place of a saved tensor: all that backward needs, whatever other forwards did since."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..errors import changed_tensor
from ..interrupts import uninterrupted
from ..wrappers import Apart
from .activations import Activations
from .block import Block, Origin, View, origin_of


class SavedTensor:
    """A tensor in a block that the manager moves. It needs the block for as long as it lives."""

    __slots__ = ("_activations", "block", "layer", "view")

    def __init__(self, activations: Activations, block: Block, view: View, layer: int) -> None:
        self._activations = activations
        self.block = block
        self.view = view
        self.layer: int | None = layer

    def load(self) -> torch.Tensor:
        """The tensor, on the device and ready for work that is issued now on the current stream.

        Raises ChangedTensor, which hooks keep autograd from seeing, or Closed.
        """
        return self._activations.load(self.block, self.view)

    @uninterrupted
    def __del__(self) -> None:
        self._activations.dropped.append(self.block)
        self._activations.bury()


class KeptTensor(NamedTuple):
    """A tensor that stays on the device: a weight, a small one, or one from outside the layers."""

    tensor: torch.Tensor
    version: int
    origin: Origin
    layer: int | None

    def load(self) -> torch.Tensor:
        """The tensor. Raises ChangedTensor."""
        if self.tensor._version != self.version:
            raise changed_tensor(self.tensor, self.origin, self.version, self.tensor._version)
        return self.tensor


class StrayTensor:
    """A large tensor that was saved outside the layers: it is kept, and moves if it proves a layer's input."""

    __slots__ = ("__weakref__", "_nbytes", "_saved")

    def __init__(self, kept: KeptTensor) -> None:
        self._saved: KeptTensor | SavedTensor = kept
        self._nbytes = kept.tensor.nbytes

    @property
    def layer(self) -> int | None:
        return self._saved.layer

    @property
    def nbytes(self) -> int:
        """The size of the tensor, wherever it is."""
        return self._nbytes

    def load(self) -> torch.Tensor:
        return self._saved.load()

    def move(self, activations: Activations, graph: int, layer: int) -> Block | None:
        """Hands the tensor over. Not if it was changed: then there is nothing right to keep."""
        kept = self._saved
        if not isinstance(kept, KeptTensor) or kept.tensor._version != kept.version:
            return None
        block, view = activations.save(kept.tensor, graph, layer)
        self._saved = SavedTensor(activations, block, view._replace(origin=kept.origin), layer)
        return block


class SavedParts:
    """A tensor made of others: each part is saved by itself, and the whole is made of them again."""

    __slots__ = ("_handle", "_origin", "_parts", "_rebuild", "_version", "layer")

    def __init__(self, whole: torch.Tensor, apart: Apart, parts: Sequence[Saved | None], layer: int | None) -> None:
        self._parts = parts
        self._rebuild = apart.rebuild
        self._handle = apart.handle
        self._version = whole._version
        self._origin = origin_of(whole)
        self.layer = layer

    def load(self) -> torch.Tensor:
        """The tensor, of the type it had. Raises as the others do."""
        if self._handle is not None and self._handle._version != self._version:
            raise changed_tensor(self._handle, self._origin, self._version, self._handle._version)
        return self._rebuild([None if part is None else part.load() for part in self._parts])


Saved = SavedTensor | KeptTensor | StrayTensor | SavedParts


def keep(tensor: torch.Tensor, layer: int | None) -> KeptTensor:
    """Keeps a tensor on the device.

    One that is not a leaf is kept detached: an operation that saves its own output would otherwise own itself.
    """
    node = tensor.grad_fn
    if node is None:
        return tuple.__new__(KeptTensor, (tensor, tensor._version, None, layer))
    return tuple.__new__(KeptTensor, (tensor.detach(), tensor._version, (node.name(), tensor.output_nr), layer))
