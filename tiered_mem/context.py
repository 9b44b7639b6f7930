"""The offload context: autograd's saved tensors on one side, the manager on the other."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from .block import Block, View, view_of
from .errors import ChangedTensor
from .policies import ForwardBegin, ForwardEnd, LayerBegin, LayerEnd

if TYPE_CHECKING:
    from .manager import TieringManager


class OffloadContext:
    """Wraps a forward: what its layers save for backward is the policy's to move.

    One context serves many forwards, one after the other; their graphs may be in flight together and run their
    backward in any order. Made by TieringManager.offload_context().
    """

    def __init__(self, manager: TieringManager, layers: Sequence[torch.nn.Module], min_bytes: int) -> None:
        self._manager = manager
        self._layers = layers
        self._min_bytes = min_bytes
        self._forward: _Forward | None = None

    def __enter__(self) -> OffloadContext:
        if self._forward is not None:
            raise RuntimeError("this offload context is entered already; make a second one to nest forwards")
        self._forward = _Forward(self._manager, self._layers, self._min_bytes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        forward, self._forward = self._forward, None
        if forward is not None:
            forward.end()


class _Forward:
    """One pass through a forward, and what backward needs to know of it."""

    def __init__(self, manager: TieringManager, layers: Sequence[torch.nn.Module], min_bytes: int) -> None:
        self._manager = manager
        self._min_bytes = min_bytes
        self._weights = {
            tensor.untyped_storage()._cdata
            for layer in layers
            for tensor in (*layer.parameters(), *layer.buffers())
        }
        self._layer: int | None = None
        self._backward_of: int | None = None
        self.graph = manager.new_graph()
        manager.notify(ForwardBegin(self.graph, len(layers)))
        self._marks = [mark for i, layer in enumerate(layers) for mark in self._mark(i, layer)]
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def end(self) -> None:
        self._hooks.__exit__()
        for mark in self._marks:
            mark.remove()
        # Autograd keeps _unpack, and so this object, for as long as the graph lives.
        del self._hooks, self._marks, self._weights
        self._manager.notify(ForwardEnd(self.graph))

    def _mark(self, index: int, layer: torch.nn.Module) -> tuple[Any, Any]:
        def begin(module: torch.nn.Module, inputs: object) -> None:
            self._layer = index
            self._manager.notify(LayerBegin(self.graph, index))

        def end(module: torch.nn.Module, inputs: object, output: object) -> None:
            self._layer = None
            self._manager.notify(LayerEnd(self.graph, index))

        return layer.register_forward_pre_hook(begin), layer.register_forward_hook(end)

    def _pack(self, tensor: torch.Tensor) -> _OnDevice | _InBlock:
        if self._layer is not None and self._movable(tensor):
            block = self._manager.save(tensor, self.graph, self._layer)
            return _InBlock(self._manager, block, view_of(tensor, block.span), self._layer)
        return _OnDevice(tensor if tensor.is_leaf else tensor.detach(), tensor._version, self._layer)

    def _unpack(self, saved: _OnDevice | _InBlock) -> torch.Tensor:
        if saved.layer is not None and saved.layer != self._backward_of:
            # The first tensor that a layer's backward asks for is how its beginning is known.
            self._backward_of = saved.layer
            self._manager.notify(LayerBegin(self.graph, saved.layer, backward=True))
        return saved.load()

    def _movable(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and self._manager.device.owns(tensor)
            and tensor.layout is torch.strided
            and tensor.nbytes >= self._min_bytes
            and tensor.untyped_storage()._cdata not in self._weights
            and not isinstance(tensor._base, torch.nn.Parameter)
            and not tensor.is_conj()
            and not tensor.is_neg()
            and self._manager.device.plain_layout(tensor)
        )


class _OnDevice:
    """A saved tensor that stays where it is: a weight, a small one, or one from outside the layers.

    A tensor that is not a leaf is kept detached: an operation that saves its own output would otherwise keep
    itself alive.
    """

    __slots__ = ("_tensor", "_version", "layer")

    def __init__(self, tensor: torch.Tensor, version: int, layer: int | None) -> None:
        self._tensor = tensor
        self._version = version
        self.layer = layer

    def load(self) -> torch.Tensor:
        # Hooks switch autograd's own check of this off.
        if self._tensor._version != self._version:
            raise ChangedTensor(
                f"a saved tensor of shape {tuple(self._tensor.shape)} was changed in place between forward and "
                f"backward: it is at version {self._tensor._version}, version {self._version} was saved"
            )
        return self._tensor


class _InBlock:
    """A saved tensor whose block the manager moves. It needs the block for as long as it lives."""

    __slots__ = ("_block", "_manager", "_view", "layer")

    def __init__(self, manager: TieringManager, block: Block, view: View, layer: int) -> None:
        self._manager = manager
        self._block = block
        self._view = view
        self.layer: int | None = layer

    def load(self) -> torch.Tensor:
        return self._manager.load(self._block, self._view)

    def __del__(self) -> None:
        self._manager.let_go(self._block)
