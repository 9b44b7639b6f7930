"""Attached models: the calls of their layers are followed wherever they come from, and copies have no hooks."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from ..device.torch_private import (
    MODULE_CALL,
    MODULE_HOOK_FLAGS,
    MODULE_HOOKS,
    current_backward,
    forward_mode_level,
    innermost_transform,
    is_fx_tracing,
    is_jit_tracing,
    saving_hooks_allowed,
)
from ..ground.interrupts import uninterrupted
from ..policies.actions import How
from .driver import Activations
from .hooks import ForwardPass, drop_ended_hooks, is_checkpoint, is_method_of
from .layers import LayerCalls, parts_around
from .movable import Movable
from .recompute import Recomputer
from .untraced import only_inlined, untraced_later

_log = logging.getLogger("tiered_mem.activations")

M = TypeVar("M", bound=Module)


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


class HookOwner:
    """Our hooks on modules are methods of one of these."""

    def __deepcopy__(self, memo: dict[int, Any]) -> HookOwner:
        return self  # it follows nobody's copy: a module may be copied by code of its own, with the hooks


class Followed(HookOwner):
    """A model with hooks on its layers, and on the parts that have layers inside.

    Other modules that have the same hooks, as replicas do, are not followed.

    make_forwards: what follows the forwards of a thread; makes one for each.
    """

    def __init__(
        self, model: Module, layers: Sequence[Module], make_forwards: Callable[[Module], ModelForwards]
    ) -> None:
        self._name = type(model).__name__
        self._make_forwards = partial(_of_living, weakref.ref(model), make_forwards)
        self._active = True
        self._seen = self._told = False
        self._of_thread = threading.local()
        self._all: list[weakref.ref[ModelForwards]] = []
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
            self._begin_layer(module, inputs, named or {})

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
    def _begin_layer(self, module: Module, args: Sequence[object], named: Mapping[str, object]) -> None:
        if self._active and self._is_followed(module):
            self._seen |= self._forwards().begin_layer(module, args, named)

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

    def _forwards(self) -> ModelForwards:
        forwards: ModelForwards | None = getattr(self._of_thread, "forwards", None)
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


class ModelForwards:
    """One after the other, on one thread.

    A forward is one call of the model, or of a part of it that has layers inside, whichever is outermost. Layers
    that are called in another way, as by a method of the model's, make a forward too: a loose one. It ends with as
    many calls as there are layers, after an exception, where its backward begins, and before a layer begins if that
    is its first one, or if nothing of it is alive any more. What is saved between its layers is not its own.

    num_layers: how many layers there are. A forward is expected to have as many calls of them as the last one.
    """

    def __init__(
        self,
        activations: Activations,
        movable: Movable,
        num_layers: int,
        recomputer: Recomputer,
        recompute: How | None,
    ) -> None:
        self._activations = activations
        self._recomputer = recomputer
        self._recompute = recompute
        self._movable = movable
        self._num_layers = self._expected = num_layers
        self._calls: LayerCalls | None = None  # of the forward that is not known to have ended
        self._loose = False
        self._hooks: saved_tensors_hooks | None = None
        self._call: weakref.ref[Module] | None = None  # what runs: the outermost part, or a loose layer
        self._deeper = 0  # calls of the outermost part inside of itself
        self._first: weakref.ref[Module] | None = None

    @property
    def under_way(self) -> bool:
        """Whether a call is, the end of which matters."""
        return self._call is not None

    def begin_around(self, module: Module) -> None:
        """A part of the model begins that has layers inside."""
        if self._call is not None:
            if self._goes_on(self._call, module):
                self._deeper += self._call() is module
                return
            self.end(early=True)
        self.end()
        if self._may_begin():
            self._begin(module, loose=False)

    def end_around(self, module: Module) -> None:
        """It has ended."""
        if self._loose or self._call is None or self._call() is not module:
            return
        if self._deeper:
            self._deeper -= 1
        else:
            self.end()

    def begin_layer(self, module: Module, args: Sequence[object], named: Mapping[str, object]) -> bool:
        """A layer begins. Whether it is part of a forward. Raises ValueError inside of another offloader."""
        again = self._first is not None and self._first() is module
        if again and self._call is not None and not self._goes_on(self._call, module):
            self.end(early=True)
        if self._call is None:
            if not self._may_begin() or is_checkpoint():
                return False
            self._end_before(again)
            self._begin(module, loose=True)
        if self._calls is None:
            return False
        if self._first is None:
            self._first = weakref.ref(module)
        try:
            self._calls.begin(module, args, named)
        except BaseException:
            if self._loose:
                self.end(early=True)
            raise
        return True

    def end_layer(self, module: Module, output: object) -> None:
        """A layer has ended. Without an output it has failed."""
        if self._calls is None:
            return
        self._calls.end(module, output)
        if self._loose and not self._calls.running:
            self._leave()
            if output is None or 1 < self._num_layers <= self._calls.forward.layers:
                self.end(early=output is None)

    def end(self, *, early: bool = False) -> None:
        """No more is part of the forward that is open, if there is one. early: it was broken off."""
        calls = self._calls
        if calls is None:
            return
        self._leave()
        self._calls = self._first = None
        if not early and calls.forward.layers:
            # How many calls there are shows only afterwards: the next forward is expected to be like this one.
            self._expected = calls.forward.layers
        calls.forward.end(early=early)

    def _end_before(self, again: bool) -> None:
        """A loose forward may have ended since its last layer. again: its first layer is the next."""
        if self._calls is not None:
            gone = self._calls.forward.gone
            if self._calls.forward.ended or gone or (again and self._num_layers > 1):
                self.end(early=gone)

    def _begin(self, module: Module, *, loose: bool) -> None:
        """A call begins that a forward lies in, or a loose layer that goes on with one."""
        drop_ended_hooks()
        if self._calls is None:
            forward = ForwardPass(
                self._activations, self._movable, self._expected, claims_strays=not loose, open_ended=loose
            )
            self._calls = LayerCalls(forward, self._recomputer, self._recompute)
            self._loose, self._deeper = loose, 0
        try:
            hooks = self._calls.forward.hooks()
            hooks.__enter__()
        except BaseException:
            self.end(early=True)
            raise
        self._hooks, self._call = hooks, weakref.ref(module)

    def _leave(self) -> None:
        hooks, self._hooks, self._call = self._hooks, None, None
        if self._calls is not None:
            self._calls.break_off()
        if hooks is not None and self._calls is not None and self._calls.forward.saves_here:
            hooks.__exit__()

    def _may_begin(self) -> bool:
        """Not where a checkpoint computes again, nor in torch.func's transforms, which are left as they are."""
        return (
            torch.is_grad_enabled()
            and not self._activations.closed
            and current_backward() == -1
            and innermost_transform() is None
            and forward_mode_level() < 0
            and not is_jit_tracing()
            and not is_fx_tracing()
            and saving_hooks_allowed()
        )

    def _goes_on(self, call: weakref.ref[Module], module: Module) -> bool:
        """Whether a call is still running while another one begins. Ctrl-C ends calls and no hook hears of it."""
        running, times = call(), 0
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is MODULE_CALL and frame.f_locals.get("self") is running:
                times += 1
            frame = frame.f_back
        return times > (running is module)


def is_attached(module: Module) -> bool:
    """Whether the module has hooks of an attachment."""
    return has_hooks(module, Followed)


_NOT_SEEN = (
    "a backward has come to the layers of %s, and no call of theirs was seen before: nothing of what they saved "
    "moves. Call the model, as model(x), or its layers, as layer(x): not their forward(x), not layers inside of "
    "torch.utils.checkpoint alone, and no model that ran compiled before it was attached"
)


def _of_living(model: weakref.ref[Module], make: Callable[[Module], ModelForwards]) -> ModelForwards:
    alive = model()
    if alive is None:
        raise ReferenceError("the model that was attached does not live any more")
    return make(alive)


def keep_apart(module: Module) -> None:
    """Copies of the module are free of our hooks from now on."""
    for name, answer in _ANSWERS.items():
        if name not in vars(module):
            vars(module)[name] = partial(answer, weakref.ref(module))


def end_apart(module: Module) -> None:
    """Nothing of ours is left on the module, if it has none of our hooks any more."""
    if not has_hooks(module):
        for name, answer in _ANSWERS.items():
            if getattr(vars(module).get(name), "func", None) is answer:
                del vars(module)[name]


def has_hooks(module: Module, owner: type[HookOwner] = HookOwner) -> bool:
    """Whether the module has hooks that are methods of such an owner."""
    return any(is_method_of(hook, owner) for name in MODULE_HOOKS for hook in vars(module)[name].values())


def _reduced(reference: weakref.ref[Module], protocol: Any) -> Any:
    module = _alive(reference)
    whole = type(module).__reduce_ex__(module, protocol)
    if not isinstance(whole, tuple) or len(whole) < 3 or not isinstance(whole[2], dict):
        return whole
    return (*whole[:2], _without_ours(module, whole[2]), *whole[3:])


def _scriptable(reference: weakref.ref[Module]) -> Module:
    return _without_hooks(_alive(reference))


# Python's name for what copy and pickle ask a module for, and torch's for what torch.jit.script does.
_ANSWERS: dict[str, Callable[..., Any]] = {"__reduce_ex__": _reduced, "__prepare_scriptable__": _scriptable}


def _without_hooks(module: M) -> M:
    """The module, if neither it nor a module inside has hooks of ours, or one without them that shares all else."""
    inside = {name: child and _without_hooks(child) for name, child in module._modules.items()}
    if not has_hooks(module) and all(child is module._modules[name] for name, child in inside.items()):
        return module
    twin = type(module).__new__(type(module))
    vars(twin).update(_without_ours(module, vars(module)), _modules=inside)
    return twin


def _without_ours(module: Module, state: dict[str, Any]) -> dict[str, Any]:
    """The module's attributes without what is ours."""
    ours = {
        key for name in MODULE_HOOKS for key, hook in vars(module)[name].items() if is_method_of(hook, HookOwner)
    }
    kept = {name: value for name, value in state.items() if name not in _ANSWERS}
    for name in {*MODULE_HOOKS, *MODULE_HOOK_FLAGS} & kept.keys():
        kept[name] = OrderedDict((key, value) for key, value in state[name].items() if key not in ours)
    return kept


def _alive(reference: weakref.ref[M]) -> M:
    module = reference()
    if module is None:
        raise ReferenceError("the module that this was made for does not live any more")
    return module
