"""Torch's hooks for saved tensors: what autograd keeps in a pass through a forward, and what it asks for."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..device.torch_private import (
    CHECKPOINT_HOOKS,
    current_backward,
    pop_saving_hooks,
    push_saving_hooks,
    saving_hooks_allowed,
    storage_id,
    top_saving_hooks,
)
from ..errors import changed_tensor
from ..ground.interrupts import uninterrupted
from ..ground.wrappers import Apart, take_apart
from ..policies.actions import How, Keep, OfLayer, Recompute
from ..policies.base import Event, ForwardBegin, ForwardEnd, LayerBegin, LayerEnd, MoreBlocks, Recomputed
from .block import Block, Origin, View, origin_of
from .movable import Movable, Stayed, has_storage, is_weight
from .untraced import never_traced

# Other offloaders by what makes their hooks, and how a user switches them on. The innermost hooks have the tensors.
_RIVALS = {
    "save_on_cpu": "torch.autograd.graph.save_on_cpu()",
    "OffloadActivations": "TRL's activation_offloading=True",
    "async_save_on_cpu": "async_save_on_cpu()",
}


class ForwardPass:
    """Autograd's saved tensors on one side, the activations of a manager on the other.

    Layers are numbered in the order in which they begin. Autograd keeps this object, by its hooks, for as long as
    the graph lives; what is handed out here is self-contained, so that graphs may be in flight together.

    num_layers: how many layers the forward is expected to have, for the policy.
    claims_strays: what is saved outside of all layers is that of the next layer to begin, and not only where it is
        one of its inputs.
    open_ended: nobody may come to say that it has ended. Then it ends where its backward begins.
    recompute: how the policy wants the layer that began last computed again. keeps: so many, from that one on, it
        wants left to autograd. aside: a layer that runs and is. settle: see Activations.
    ended: `end` was called. elsewhere: nothing that its layers saved has come here.
    """

    def __init__(
        self,
        activations: Keeper,
        movable: Movable,
        num_layers: int,
        *,
        claims_strays: bool = False,
        open_ended: bool = False,
    ) -> None:
        self._activations, self.settle = activations, activations.settle
        self._claims_strays = claims_strays
        self._open_ended = open_ended
        self._movable = movable
        self._weights = movable.weights()
        self._min_bytes = movable.min_bytes
        self._small = movable.stayed.of("small")
        self._small_before = 0  # the layer that runs
        self._expected = num_layers
        self._layer: int | None = None
        # Of the layer that began last. torch's StorageWeakRef would swallow an interrupt when it dies.
        self._inputs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._called_with = 0  # their bytes
        self._strays: dict[int, list[weakref.ref[StrayTensor]]] = {}
        self._backward_of: int | None = None
        self.keys: list[dict[int, None]] = []
        self.saver: int | None = None  # the layer that saved the tensor which came last
        self.recompute: How | None = None
        self.keeps = 0
        self._kept = range(0)  # layers of which nothing is told
        self.aside: int | None = None
        self.ended = False
        self.elsewhere = False
        self.graph = activations.new_graph()
        activations.notify(ForwardBegin(self.graph, num_layers))

    @property
    def movable(self) -> Movable:
        """What judges its tensors."""
        return self._movable

    @property
    def layers(self) -> int:
        """How many have begun so far."""
        return len(self.keys)

    @property
    def blocks(self) -> list[int]:
        """The keys of those that it has saved so far."""
        return [key for layer in self.keys for key in layer]

    @property
    def gone(self) -> bool:
        """Whether it has saved blocks, and none of them is needed any more."""
        blocks = self.blocks
        return bool(blocks) and not self._activations.any_alive(blocks)

    @property
    def saves_here(self) -> bool:
        """Whether what this thread saves now comes here."""
        return owner_of(saving_hook()) is self

    def hooks(self) -> saved_tensors_hooks:
        """What is saved inside is this pass's. Raises ValueError inside of another offloader's."""
        refuse_rivals()
        return saved_tensors_hooks(self.pack, self.unpack)

    def begin_layer(self, inputs: Iterable[object] = ()) -> int:
        """The next layer begins, and has its number. What it saves from now on is its own.

        inputs: what it is called with. They are its own too, even where a checkpoint around it saves them.
        """
        layer = self._layer = len(self.keys)
        self.keys.append({})
        self.recompute, self.keeps = None, 0
        if layer in self._kept:
            self.keeps = self._kept.stop - layer
            self._called_with, self._inputs = 0, {}
            return layer
        tensors = [each for each in inputs if type(each) is torch.Tensor and has_storage(each)]
        self._called_with = sum([tensor.nbytes for tensor in tensors])
        answer = self._activations.notify(LayerBegin(self.graph, layer, inputs=self._called_with))
        if answer is not None and answer.layer == layer:
            if type(answer) is Keep:
                self.keeps = answer.layers
            else:
                self.recompute = cast(Recompute, answer).how
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._inputs = {storage_id(storage): weakref.ref(storage) for storage in storages}
        if self._strays:
            self._claim_strays(layer)
        return layer

    def computes_again(self, layer: int, *, trial: bool, results: int, unsaved: int) -> None:
        """The layer that has ended will be computed again. trial, results, unsaved: as a `Recomputed` has them."""
        self._activations.notify(Recomputed(self.graph, layer, trial, results, unsaved))

    def resume_layer(self, layer: int | None) -> None:
        """A layer that was begun goes on, after one that lies inside it; None is outside of them all."""
        self._layer = layer

    def end_layer(self, layer: int) -> None:
        self._layer = None
        if self.aside is not None and layer <= self.aside:
            self.come_back()
        if layer in self._kept:
            return
        unsaved = max(0, self._called_with - self._activations.saved_of(self._inputs))
        self._activations.notify(LayerEnd(self.graph, layer, unsaved))
        small, self._small_before = self._small.nbytes - self._small_before, self._small.nbytes
        if self._movable.adapt(small, self._expected, max(0, self._expected - layer - 1)):
            self._activations.notify(MoreBlocks(self.graph))
        self._min_bytes = self._movable.min_bytes

    def stand_aside(self, layer: int) -> None:
        """What the layer saves, which has begun, is autograd's own. Not where others' hooks would have it."""
        if self.aside is not None:
            return  # it lies inside of that one
        self._kept = range(0)
        if self.saves_here:
            pop_saving_hooks()
            if top_saving_hooks(False) is None:
                self.aside, self._kept = layer, range(layer, layer + self.keeps)
                self._called_with, self._inputs = 0, {}  # what it saves of its inputs, nobody knows
            else:
                push_saving_hooks(self.pack, self.unpack)

    def come_back(self) -> None:
        """What is saved comes here again: the layer has ended, or is broken off."""
        if self.aside is not None:
            self.aside = None
            push_saving_hooks(self.pack, self.unpack)

    @uninterrupted
    def begin_backward(self, layer: int) -> None:
        """The layer's backward begins. The first tensor that it asks for tells as much."""
        if layer != self._backward_of:
            if self._open_ended and self._layer is None:
                self.end()
            self._backward_of = layer
            self._activations.notify(LayerBegin(self.graph, layer, backward=True))

    def end(self, *, early: bool = False) -> None:
        """No more is saved. What was saved stays until autograd lets go of it. Idempotent.

        early: it was broken off, and says nothing of what a whole one leaves on the device.
        """
        if self.ended:
            return
        self.ended = True
        self._layer = None
        self._inputs = {}
        self._strays = {}
        self._weights = frozenset()
        self._activations.notify(ForwardEnd(self.graph))
        moved = self._activations.count_stayed(self.blocks, self._movable.stayed)
        broken_off = early or self._activations.closed
        self._movable.stayed.forward_ends(
            None if broken_off else moved, layers=len(self.keys), elsewhere=self.elsewhere
        )

    # Each tensor that a model saves comes through here, most of them to stay. So the two calls ask what is cheap
    # first, and call few functions.
    @never_traced
    @uninterrupted
    def pack(self, tensor: torch.Tensor) -> Saved:
        """What autograd keeps of a tensor that is saved."""
        kind = type(tensor)
        layer = self.saver = self._layer
        if kind is torch.Tensor:
            if tensor.layout is not torch.strided or tensor.is_nested:
                self._movable.note_stay(tensor)
            elif (nbytes := tensor.nbytes) < self._min_bytes:
                if type(tensor._base) is not torch.nn.Parameter:
                    small = self._small
                    small.count += nbytes > 0
                    small.nbytes += nbytes
            elif self._movable.moves(tensor, self._weights):
                if layer is None:
                    if not self._is_input(tensor.untyped_storage()):
                        return self._pack_stray(tensor)
                    layer = len(self.keys) - 1
                block, view = self._activations.save(tensor, self.graph, layer)
                self.keys[layer][block.key] = None
                return SavedTensor(self._activations, block, view, layer)
        elif kind is not torch.nn.Parameter:
            # FSDP2 frees what it has gathered of a DTensor, which is in no list of weights.
            if self._movable.large(tensor) and not is_weight(tensor) and (apart := take_apart(tensor)) is not None:
                parts = [None if part is None else self.pack(part) for part in apart.parts]
                return SavedParts(tensor, apart, parts, layer)
            self._movable.note_stay(tensor)
        return keep(tensor, layer)

    @never_traced
    @uninterrupted
    def unpack(self, saved: Saved) -> torch.Tensor:
        """The tensor as it was saved, ready for the work that comes next on the current stream."""
        layer = saved.layer
        if layer is not None and layer != self._backward_of:
            self.begin_backward(layer)
        if torch.is_grad_enabled() and current_backward() != -1:
            self._follow_next_graph()
        if type(saved) is SavedTensor:
            return self._activations.load(saved.block, saved.view)
        if type(saved) is KeptTensor and saved.tensor._version == saved.version:
            return saved.tensor
        return saved.load()

    def _follow_next_graph(self) -> None:
        """With create_graph=True a backward saves tensors for another one, which are the policy's to move as well.

        Autograd's engine gives each node of a backward the hooks that were there when the backward began. So what
        is added here ends with the node that asks for a saved tensor, and is for what that node saves.
        """
        if not self.saves_here and saving_hooks_allowed():
            self._weights = self._movable.weights()
            push_saving_hooks(self._pack_in_backward, self.unpack)

    def _pack_in_backward(self, tensor: torch.Tensor) -> Saved:
        layer, self._layer = self._layer, self._backward_of
        try:
            return self.pack(tensor)
        finally:
            self._layer = layer

    def _is_input(self, storage: torch.UntypedStorage) -> bool:
        reference = self._inputs.get(storage_id(storage))
        return reference is not None and reference() is storage

    def _pack_stray(self, tensor: torch.Tensor) -> StrayTensor | KeptTensor:
        kept = keep(tensor, None)
        if self.ended or not has_storage(kept.tensor):  # what is detached inside torch.func's transforms is theirs
            return kept
        self._movable.stayed.add("outside", tensor.nbytes)
        stray = StrayTensor(kept)
        self._strays.setdefault(storage_id(tensor.untyped_storage()), []).append(weakref.ref(stray))
        return stray

    def _claim_strays(self, layer: int) -> None:
        claimed = list(self._strays) if self._claims_strays else self._inputs.keys() & self._strays.keys()
        for storage in claimed:
            for reference in self._strays.pop(storage):
                stray = reference()
                block = None if stray is None else stray.move(self._activations, self.graph, layer)
                if stray is not None and block is not None:
                    self._movable.stayed.take_back("outside", stray.nbytes)
                    self.keys[layer][block.key] = None


class Keeper(Protocol):
    """What takes saved tensors from a forward and gives them back: the `Activations` of a manager."""

    closed: bool
    dropped: deque[Block]
    free_dropped: Callable[[], None]

    def new_graph(self) -> int: ...

    def notify(self, event: Event) -> OfLayer | None: ...

    def save(self, tensor: torch.Tensor, graph: int, layer: int) -> tuple[Block, View]: ...

    def load(self, block: Block, view: View) -> torch.Tensor: ...

    def settle(self, storages: Collection[int]) -> None: ...

    def any_alive(self, keys: Iterable[int]) -> bool: ...

    def saved_of(self, storages: Mapping[int, Callable[[], torch.UntypedStorage | None]]) -> int: ...

    def count_stayed(self, keys: Iterable[int], stayed: Stayed) -> int: ...


class SavedTensor:
    """A tensor in a block that the manager moves. It needs the block for as long as it lives."""

    __slots__ = ("_activations", "block", "layer", "view")

    def __init__(self, activations: Keeper, block: Block, view: View, layer: int) -> None:
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
        self._activations.free_dropped()


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

    def move(self, activations: Keeper, graph: int, layer: int) -> Block | None:
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


def is_packing() -> bool:
    """Whether what this thread saves now goes to a ForwardPass."""
    return is_method_of(saving_hook(), ForwardPass)


def drop_ended_hooks() -> None:
    """Takes away hooks of forwards that have ended while others' hooks lay above theirs."""
    while isinstance(forward := owner_of(saving_hook()), ForwardPass) and forward.ended:
        pop_saving_hooks()


def saving_hook() -> Callable[..., Any] | None:
    """What this thread's saved tensors go to now. Autograd knows: the innermost hooks win."""
    hooks = top_saving_hooks(False)
    return None if hooks is None else hooks[0]


def refuse_rivals() -> None:
    """Raises ValueError where another offloader is about to have what is saved."""
    rival = getattr(saving_hook(), "__qualname__", "").partition(".")[0]
    if rival in _RIVALS:
        raise ValueError(
            f"{_RIVALS[rival]} and tiered_mem's attach() or offload_context() would both move the same tensors: "
            "leave out one of the two"
        )


def owner_of(function: object) -> object:
    """Whose method a function is, by itself or as `untraced` returned it. None if it is nobody's."""
    return getattr(getattr(function, "__wrapped__", function), "__self__", None)


def is_method_of(function: object, kind: type) -> bool:
    """Whether a function is a method of an object of this kind."""
    return isinstance(owner_of(function), kind)


def is_checkpoint() -> bool:
    """Whether what is saved now goes to torch.utils.checkpoint, which throws it away."""
    return getattr(saving_hook(), "__qualname__", "").startswith(CHECKPOINT_HOOKS)


def computes_again() -> bool:
    """Whether a checkpoint computes on this thread what it threw away."""
    return getattr(saving_hook(), "__qualname__", "").startswith(CHECKPOINT_HOOKS[1])
