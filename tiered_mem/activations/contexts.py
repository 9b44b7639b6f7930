"""The offload contexts, and what makes them for a manager and checks what it is given for them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import get_ident
from types import TracebackType

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from ..device.device import Device
from ..ground.arguments import instance, items, whole_number, yes_or_no
from ..ground.interrupts import Interrupts, uninterrupted
from ..ground.stats import Counters
from ..policies.actions import How
from ..policies.base import ManualPolicy, Policy
from ..policies.planned import PlannedPolicy
from ..sizes import format_bytes, parse_bytes
from .attachment import Attachment, Followed, HookOwner, ModelForwards, end_apart, is_attached, keep_apart
from .driver import Activations
from .hooks import ForwardPass
from .layers import LayerCalls, repeated_blocks
from .movable import Movable, Stayed
from .recompute import Recomputer
from .untraced import untraced

# What is smaller stays, as a rule: each copy costs the host as much as one of many MiB.
_LARGE = 1 << 20


class Contexts:
    """Contexts for the activations of one manager. Arguments and errors are those of TieringManager.

    disk_bytes: what the tier below the host has room for; None where there is none.
    recompute: which layers may be computed again.
    """

    def __init__(
        self,
        activations: Activations,
        policy: Policy,
        device: Device,
        disk_bytes: int | None,
        counters: Counters,
        interrupts: Interrupts,
        recompute: str | bool,
    ) -> None:
        # A plan is for steps that are alike, and what the first ones keep it moves.
        self._recomputer = Recomputer(recompute, at_once=isinstance(policy, PlannedPolicy))
        self._activations = activations
        self._policy = policy
        self._device = device
        self._disk_bytes = disk_bytes
        self._counters = counters
        self._interrupts = interrupts
        self._followed: list[weakref.ref[Followed]] = []
        self._of_blocks: dict[tuple[object, int, int | str | None], LayerContext] = {}

    def of_layers(
        self,
        layers: Iterable[torch.nn.Module] | torch.nn.Module,
        *,
        min_bytes: int | str | None,
        recompute: How | None,
    ) -> OffloadContext:
        """For layers that the user names, or for a model's own."""
        calls = partial(LayerCalls, recomputer=self._recomputer, recompute=self._recomputer.check(recompute))
        if isinstance(layers, torch.nn.Module) and not isinstance(layers, torch.nn.ModuleList):
            blocks = repeated_blocks(layers)
            movable = self._movable_of(layers, blocks, min_bytes)
            return OffloadContext(self._activations, blocks, movable, calls, whole=True)
        modules = [instance("layers", layer, torch.nn.Module) for layer in items("layers", layers)]
        self._policy.check(len(modules))
        movable = self.movable(modules, min_bytes=min_bytes)
        return OffloadContext(self._activations, modules, movable, calls, whole=False)

    def attach(
        self,
        model: torch.nn.Module,
        *,
        layers: Iterable[torch.nn.Module] | None = None,
        min_bytes: int | str | None,
        recompute: How | None,
    ) -> Attachment:
        """For each forward of a model."""
        recompute = self._recomputer.check(recompute)
        instance("model", model, torch.nn.Module)
        if layers is None:
            named = repeated_blocks(model)
        else:
            named = [instance("layers", layer, torch.nn.Module) for layer in layers]
        if any(map(is_attached, (model, *named))):
            raise ValueError(f"this {type(model).__name__} is attached already: remove() that attachment first")
        places = [weakref.ref(layer) for layer in named]
        forwards_of = partial(self._forwards_of, layers=places, min_bytes=min_bytes, recompute=recompute)
        followed = Followed(model, named, forwards_of)
        self._interrupts.tell(followed)
        self._followed = [each for each in self._followed if each() is not None] + [weakref.ref(followed)]
        return Attachment(followed)

    def close(self) -> None:
        """No model is attached any more."""
        for each in self._followed:
            if (followed := each()) is not None:
                followed.stop()

    def of_loop(self, num_layers: int, *, min_bytes: int | str | None, variable_depth: bool) -> LayerContext:
        """For a loop of the user's own."""
        whole_number("num_layers", num_layers, at_least=1)
        yes_or_no("variable_depth", variable_depth)
        self._policy.check(num_layers)
        movable = self.movable(min_bytes=min_bytes)
        return LayerContext(LayerSequence(self._activations, movable, num_layers, variable_depth=variable_depth))

    def of_blocks(self, group: object, depth: int, *, min_bytes: int | str | None) -> LayerContext:
        """For a loop over blocks that say their numbers: the same one each time."""
        loop = group, depth, min_bytes
        if loop not in self._of_blocks:
            self._of_blocks[loop] = self.of_loop(depth, min_bytes=min_bytes, variable_depth=True)
        return self._of_blocks[loop]

    def movable(
        self,
        layers: Sequence[torch.nn.Module] = (),
        *,
        others: Sequence[torch.nn.Module] = (),
        min_bytes: int | str | None = 1,
        min_elements: int = 1,
        replaced: Callable[[], bool] = lambda: False,
    ) -> Movable:
        """What judges saved tensors for one context. Raises ValueError where no block would fit the disk tier.

        min_bytes: None is 1 MiB, and less where that fills the device.
        replaced: whether the model has no layer any more of these.
        """
        weights = (weight for layer in layers for weight in layer.parameters())
        self._device.check_some_here("the parameters of the layers", weights)
        nbytes = _LARGE if min_bytes is None else parse_bytes(min_bytes, "min_bytes")
        if self._disk_bytes is not None and self._disk_bytes < nbytes:
            raise ValueError(
                f"spill_bytes is {format_bytes(self._disk_bytes)}, and no block is below min_bytes, which "
                f"is {format_bytes(nbytes)}: none would fit. Raise the one or lower the other"
            )
        silent = isinstance(self._policy, ManualPolicy | PlannedPolicy)
        stayed = Stayed(self._counters.stayed, silent=silent, replaced=replaced)
        lacks = self._policy.lacks if min_bytes is None else None
        return Movable(
            self._device,
            layers,
            stayed,
            others=others,
            min_bytes=nbytes,
            min_elements=min_elements,
            lacks=lacks,
        )

    def _forwards_of(
        self,
        model: torch.nn.Module,
        *,
        layers: Sequence[weakref.ref[torch.nn.Module]],
        min_bytes: int | str | None,
        recompute: How | None,
    ) -> ModelForwards:
        alive = [layer for each in layers if (layer := each()) is not None]
        movable = self._movable_of(model, alive, min_bytes)
        return ModelForwards(self._activations, movable, len(alive), self._recomputer, recompute)

    def _movable_of(
        self, model: torch.nn.Module, layers: list[torch.nn.Module], min_bytes: int | str | None
    ) -> Movable:
        self._policy.check(len(layers))
        inside = {module for layer in layers for module in layer.modules()}
        others = [module for module in model.modules() if module not in inside]
        places = [weakref.ref(layer) for layer in layers]
        replaced = partial(_are_replaced, weakref.ref(model), places)
        return self.movable(layers, others=others, min_bytes=min_bytes, replaced=replaced)


class OffloadContext(contextlib.ContextDecorator):
    """Wraps a forward: what its layers save for backward is the policy's to move.

    Each call of a layer counts, in the order in which they come: layers may be called in any order, several times,
    or not at all. A layer inside another one interrupts it. One context serves many forwards, one after the other;
    their graphs may be in flight together and run their backward in any order. Also a decorator for a function that
    runs the forward. Only the thread that enters it is concerned: others may run the same layers meanwhile. Made by
    TieringManager.offload_context().

    Args:
        activations: The manager's.
        layers: The modules whose calls count.
        movable: Says which saved tensors may move.
        calls: Makes what follows the calls of a forward's layers.
        whole: The layers are those of the model that is run. What is saved before one of them is its own too.
    """

    def __init__(
        self,
        activations: Activations,
        layers: Sequence[torch.nn.Module],
        movable: Movable,
        calls: Callable[[ForwardPass], LayerCalls],
        *,
        whole: bool,
    ) -> None:
        self._activations = activations
        self._calls = calls
        self._layers = layers
        self._movable = movable
        self._whole = whole
        self._expected = len(layers)
        self._entered: _Entered | None = None

    @uninterrupted
    def __enter__(self) -> OffloadContext:
        if self._entered is not None:
            raise RuntimeError("this offload context is entered already; make a second one to nest forwards")
        forward = ForwardPass(self._activations, self._movable, self._expected, claims_strays=self._whole)
        self._entered = _Entered(self._calls(forward), self._layers)
        return self

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            layers = entered.leave(early=error is not None)
            if error is None and layers > 0:
                # How many calls there are shows only afterwards: the next forward is expected to be like this one.
                self._expected = layers


class _Entered(HookOwner):
    """What there is only while a forward runs: hooks on the layers, for this thread.

    Raises what torch does where saved-tensor hooks are not allowed, as in torch.func.grad, and ValueError inside of
    another offloader. Nothing is left then. One inside of the layers shows only when nothing has come.
    """

    def __init__(self, calls: LayerCalls, layers: Sequence[torch.nn.Module]) -> None:
        self._calls = calls
        self._thread = get_ident()
        self._marks: list[RemovableHandle] = []
        self._layers = list(dict.fromkeys(layers))
        try:
            self._hooks: saved_tensors_hooks = calls.forward.hooks()
            self._hooks.__enter__()
        except BaseException:
            calls.forward.end(early=True)
            raise
        begin, end = untraced(self._begin), untraced(self._end)
        for layer in self._layers:
            keep_apart(layer)
            self._marks.append(layer.register_forward_pre_hook(begin, with_kwargs=True))
            self._marks.append(layer.register_forward_hook(end, always_call=True))

    def leave(self, *, early: bool) -> int:
        """Takes the hooks away. Returns how many layers ran. early: an exception ended the forward."""
        self._calls.break_off()
        self._hooks.__exit__()
        for mark in self._marks:
            mark.remove()
        for layer in self._layers:
            end_apart(layer)
        self._calls.forward.end(early=early)
        return self._calls.forward.layers

    # torch adds a hook before it notes that the hook takes the named inputs as well: another thread may see the one
    # without the other.
    @uninterrupted
    def _begin(
        self, module: torch.nn.Module, inputs: tuple[object, ...], named: dict[str, object] | None = None
    ) -> None:
        if get_ident() == self._thread:
            self._calls.begin(module, inputs, named or {})

    @uninterrupted
    def _end(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        if get_ident() == self._thread:
            self._calls.end(module, output)


class LayerContext(contextlib.ContextDecorator):
    """Entered once for each layer, in Transformer Engine's manner:

        for layer in layers:
            with offload:
                x = layer(x)
            x = offload.sync(x)

    Entering it while gradients are off does nothing and counts nothing. Made by TieringManager.layer_context().
    """

    def __init__(self, sequence: LayerSequence) -> None:
        self._sequence = sequence
        self._entered = False
        self._hooks: saved_tensors_hooks | None = None
        self._last: tuple[ForwardPass, int] | None = None
        self._block = -1

    @property
    def forward(self) -> ForwardPass | None:
        """The forward of the layer that was entered last. None where gradients were off."""
        return None if self._last is None else self._last[0]

    def block(self, number: int) -> None:
        """The layer to be entered next has this number. One that is not above the last one begins a new forward."""
        if torch.is_grad_enabled():
            if number <= self._block:
                self.restart()
            self._block = number

    @uninterrupted
    def __enter__(self) -> LayerContext:
        if self._entered:
            raise RuntimeError("this offload context is entered already: leave it before the next layer")
        self._last = None
        if torch.is_grad_enabled():
            try:
                layer = self._sequence.begin()
                hooks = self._sequence.forward.hooks()
                hooks.__enter__()  # torch.func.grad, for one, does not allow it
            except BaseException:
                self._sequence.restart()
                raise
            self._last = self._sequence.forward, layer
            self._hooks = hooks
        self._entered = True
        return self

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hooks, self._hooks = self._hooks, None
        self._entered = False
        if hooks is not None:
            hooks.__exit__()
            if error is None:
                self._sequence.end()
            else:
                self._sequence.restart()

    def sync(self, output: torch.Tensor) -> torch.Tensor:
        """Tells when the layer's backward begins: that is when the gradient of this output of it arrives.

        Returns the output. It may be left out; backward then begins with the first tensor that it asks for.
        Raises RuntimeError before the first layer.
        """
        if self._last is None:
            if torch.is_grad_enabled() and output.requires_grad:
                raise RuntimeError("sync comes after the layer: enter the offload context first")
            return output
        forward, layer = self._last
        if output.requires_grad and output.grad_fn is not None:
            output.grad_fn.register_prehook(lambda gradients: forward.begin_backward(layer))
        return output

    def restart(self) -> None:
        """The next layer is the first of a new forward. An exception inside the context does the same."""
        self._sequence.restart()


class LayerSequence:
    """Numbers the layers of one forward after the other: after `num_layers` of them the next is the first again.

    variable_depth: a forward may end early. Once nothing that it saved is alive, the next layer is the first again.
        Without it the numbers follow the order of the calls alone, as a schedule for pipelines needs it.
    """

    def __init__(
        self, activations: Activations, movable: Movable, num_layers: int, *, variable_depth: bool
    ) -> None:
        self._activations = activations
        self._movable = movable
        self._num_layers = num_layers
        self._variable_depth = variable_depth
        self._forward: ForwardPass | None = None
        self._open: int | None = None
        self._complete = False

    @property
    def forward(self) -> ForwardPass:
        """The forward that runs, or ran last. Raises RuntimeError before the first."""
        if self._forward is None:
            raise RuntimeError("no layer has begun yet")
        return self._forward

    def keys(self) -> list[int]:
        """The blocks that this forward has saved so far."""
        return [] if self._forward is None else self._forward.blocks

    @property
    def layer(self) -> int | None:
        """The layer that runs."""
        return self._open

    def begin(self) -> int:
        """The next layer begins. Returns its number."""
        if self._complete or (self._variable_depth and self._forward is not None and self._forward.gone):
            self.restart()
        if self._forward is None:
            self._forward = ForwardPass(self._activations, self._movable, self._num_layers)
        self._open = self._forward.begin_layer()
        return self._open

    def end(self) -> None:
        """The layer that runs ends."""
        if self._open is None:
            return
        forward, layer = self.forward, self._open
        self._open = None
        try:
            forward.end_layer(layer)
        finally:
            if forward.layers == self._num_layers:
                self._complete = True
                forward.end()

    @uninterrupted
    def restart(self) -> None:
        """The next layer is the first of a new forward. What this one saved stays for its backward."""
        forward, self._forward = self._forward, None
        layer, self._open = self._open, None
        complete, self._complete = self._complete, False
        if forward is None:
            return
        try:
            if layer is not None:
                forward.end_layer(layer)
        finally:
            if not complete:
                forward.end(early=True)


def _are_replaced(model: weakref.ref[torch.nn.Module], layers: Sequence[weakref.ref[torch.nn.Module]]) -> bool:
    alive = model()
    return alive is not None and set(alive.modules()).isdisjoint(layer() for layer in layers)
