"""Attached models: the calls of their layers are followed wherever they come from."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from ..ground.interrupts import uninterrupted
from .copies import HookOwner, end_apart, has_hooks, keep_apart
from .hooks import only_inlined, untraced_later
from .layers import parts_around

_log = logging.getLogger("tiered_mem.activations")


class Attachment:
    """What TieringManager.attach() returns. Keeps no model alive. A context manager, which ends with remove()."""

    def __init__(self, followed: Followed) -> None:
        self._followed = followed

    def remove(self) -> None:
        """The model runs as before. What it saved until now keeps moving. Idempotent."""
        self._followed.stop()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class Forwards(Protocol):
    """The forwards of a model on one thread, found by the calls of its modules."""

    @property
    def under_way(self) -> bool: ...
    def begin_around(self, module: Module) -> None: ...
    def end_around(self, module: Module) -> None: ...
    def begin_layer(self, module: Module, inputs: Iterable[object]) -> bool: ...
    def end_layer(self, module: Module, output: object) -> None: ...
    def end(self, *, early: bool = False) -> None: ...


class Followed(HookOwner):
    """A model with hooks on its layers, and on the parts that have layers inside.

    Other modules that have the same hooks, as replicas do, are not followed.

    make_forwards: what follows the forwards of a thread; makes one for each.
    """

    def __init__(
        self, model: Module, layers: Sequence[Module], make_forwards: Callable[[Module], Forwards]
    ) -> None:
        self._name = type(model).__name__
        self._make_forwards = partial(_of_living, weakref.ref(model), make_forwards)
        self._active = True
        self._seen = self._told = False
        self._of_thread = threading.local()
        self._all: list[weakref.ref[Forwards]] = []
        self._forwards()  # what is wrong with them shows now
        self._modules: dict[int, weakref.ref[Module]] = {}
        self._marks: list[RemovableHandle] = []
        for layer in layers:
            self._follow(layer, self.begin_layer, self.end_layer)
        for part in parts_around(model, layers):
            self._follow(part, self.begin_around, self.end_around)
        weights = (weight for layer in layers for weight in layer.parameters())
        trained = next((weight for weight in weights if weight.requires_grad and weight.is_leaf), None)
        if trained is not None:
            self._watch(trained)

    def leave(self) -> None:
        """What this thread runs of the model is broken off."""
        if (forwards := getattr(self._of_thread, "forwards", None)) is not None:
            forwards.end(early=True)

    @uninterrupted
    def stop(self) -> None:
        """Follows no further forward. Hooks stay until the forwards of other threads have ended."""
        self._active = False
        self.leave()
        self._take_away()

    # torch adds a hook before it notes that the hook takes the named inputs as well: another thread may see the one
    # without the other. And torch.export traces what it comes to.
    @only_inlined
    def begin_layer(
        self, module: Module, inputs: tuple[object, ...], named: dict[str, object] | None = None
    ) -> None:
        if not torch.compiler.is_exporting():
            self._begin_layer(module, (*inputs, *(named or {}).values()))

    @only_inlined
    def end_layer(self, module: Module, inputs: object, output: object) -> None:
        if not torch.compiler.is_exporting():
            self._end_layer(module, output)

    @only_inlined
    def begin_around(self, module: Module, inputs: object, named: object = None) -> None:
        if not torch.compiler.is_exporting():
            self._begin_around(module)

    @only_inlined
    def end_around(self, module: Module, inputs: object, output: object) -> None:
        if not torch.compiler.is_exporting():
            self._end_around(module)

    @untraced_later
    @uninterrupted
    def _begin_layer(self, module: Module, inputs: Sequence[object]) -> None:
        if self._active and self._is_followed(module):
            self._seen |= self._forwards().begin_layer(module, inputs)

    @untraced_later
    @uninterrupted
    def _end_layer(self, module: Module, output: object) -> None:
        if self._is_followed(module):
            self._forwards().end_layer(module, output)
            self._take_away()

    @untraced_later
    @uninterrupted
    def _begin_around(self, module: Module) -> None:
        if self._active and self._is_followed(module):
            self._forwards().begin_around(module)

    @untraced_later
    @uninterrupted
    def _end_around(self, module: Module) -> None:
        if self._is_followed(module):
            self._forwards().end_around(module)
            self._take_away()

    def _follow(self, module: Module, begin: Callable[..., None], end: Callable[..., None]) -> None:
        self._modules[id(module)] = weakref.ref(module)
        keep_apart(module)
        self._marks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
        # Whoever puts hooks for saved tensors on the stack in a hook before ours takes them away after ours.
        self._marks.append(module.register_forward_hook(end, always_call=True, prepend=True))

    def _watch(self, weight: torch.Tensor) -> None:
        """Says at the first gradient of a weight whether its layer was seen to be called."""
        me = weakref.ref(self)

        # What a weight's hook raises leaves nodes in a queue of autograd's, and what they have saved alive. The
        # hook does not take itself away, as FSDP2 calls a weight's hooks while it goes through them. Nor does it
        # keep this alive: through a manager's optimizers it would lead back to the weight, in a circle that the
        # garbage collector does not see.
        @uninterrupted
        def gradient_is_there(weight: torch.Tensor) -> None:
            followed = me()
            if followed is not None and followed._active and not (followed._seen or followed._told):
                followed._told = True
                _log.warning(_NOT_SEEN, followed._name)

        self._marks.append(
            weight.register_post_accumulate_grad_hook(gradient_is_there)  # type: ignore[no-untyped-call]
        )

    def _is_followed(self, module: Module) -> bool:
        known = self._modules.get(id(module))
        return known is not None and known() is module

    def _forwards(self) -> Forwards:
        forwards: Forwards | None = getattr(self._of_thread, "forwards", None)
        if forwards is None:
            forwards = self._of_thread.forwards = self._make_forwards()
            self._all = [each for each in self._all if each() is not None] + [weakref.ref(forwards)]
        return forwards

    def _take_away(self) -> None:
        """Takes the hooks away, if nobody needs them any more."""
        if self._active or any(forwards.under_way for each in self._all if (forwards := each()) is not None):
            return
        for mark in self._marks:
            mark.remove()
        for known in self._modules.values():
            if (module := known()) is not None:
                end_apart(module)


def is_attached(module: Module) -> bool:
    """Whether the module has hooks of an attachment."""
    return has_hooks(module, Followed)


_NOT_SEEN = (
    "a backward has come to the layers of %s, and no call of theirs was seen before: nothing of what they saved "
    "moves. Call the model, as model(x), or its layers, as layer(x): not their forward(x), not layers inside of "
    "torch.utils.checkpoint alone, and no model that ran compiled before it was attached"
)


def _of_living(model: weakref.ref[Module], make: Callable[[Module], Forwards]) -> Forwards:
    alive = model()
    if alive is None:
        raise ReferenceError("the model that was attached does not live any more")
    return make(alive)
