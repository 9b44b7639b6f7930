"""Layers that keep little of what they save, and are computed again when backward comes to them."""

from __future__ import annotations

import functools
import importlib
import logging
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from ..device.torch_private import (
    DYNAMO,
    REENTRANT_CHECKPOINT,
    checkpoint_halves,
    innermost_transform,
    top_saving_hooks,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from ..errors import NotRepeatable
from ..ground.interrupts import uninterrupted
from ..ground.wrappers import plain_tensors
from ..policies.base import How
from .hooks import ForwardPass, Saved, is_checkpoint
from .operators import CHECKPOINT_INSIDE, GiveResults, KeepResults, Operation, Watch

_log = logging.getLogger("tiered_mem.activations")


class Recomputer:
    """Treats calls of layers as a policy wants it, where that gives the same numbers. Of any thread.

    A call is of a kind: layers of one type and of the same weights by shape, with inputs of the same shapes and
    dtypes, under the same autocast. In each forward the first call by a layer that was not looked at is a trial: it
    keeps all and is computed again all the same, to be compared. The calls that follow count on its outcome: where
    it is bad, the backward ends with NotRepeatable. So each layer has a trial, one of a kind in each forward.

    wanted: "auto" treats what comes out the same, "allow" also what differs in its bits; False treats nothing.
    at_once: the trials of all layers are in one forward. What they keep has to find room, as in a plain one.
    Raises ValueError for anything else that is wanted.
    """

    def __init__(self, wanted: str | bool, *, at_once: bool) -> None:
        if wanted is not False and wanted not in ("auto", "allow"):
            raise ValueError(f'recompute is "auto", "allow" or False, not {wanted!r}')
        self._allow = wanted == "allow"
        self._forbid = wanted is False
        self._at_once = at_once
        self._kinds: dict[Kind, Verdict] = {}

    def check(self, how: How | None) -> How | None:
        """What a context is asked for. Raises ValueError."""
        if how is not None and how not in get_args(How):
            raise ValueError(f'recompute is "cheap", "full" or None, not {how!r}')
        if how is not None and self._forbid:
            raise ValueError(f"recompute={how!r} is asked of a TieringManager(recompute=False)")
        if how is not None:
            # The checkpoint imports it, and its import keeps the frames that it began in until the garbage is
            # collected: better these than a forward's.
            importlib.import_module(DYNAMO)
        return how

    def begin(
        self,
        how: How,
        forward: ForwardPass,
        layer: int,
        module: Module,
        args: Sequence[object],
        named: Mapping[str, object],
    ) -> RecomputedCall | None:
        """A layer's forward begins, to be computed again in backward. None where it keeps all that it saves."""
        if self._forbid or not torch.is_grad_enabled():
            return None
        if not forward.saves_here or innermost_transform() is not None:
            return None
        leaves, structure = tree_flatten((tuple(args), dict(named)))
        kind = Kind.of(how, module, leaves)
        verdict = self._kinds.setdefault(kind, Verdict(type(module).__name__))
        if len(self._kinds) > _MOST_KINDS:
            self._kinds.pop(next(iter(self._kinds)), None)
        trial = verdict.under_way
        if verdict.excluded or (trial is not None and trial.running):
            return None
        call = Call(forward, layer, module, leaves, structure)
        if module in verdict.equal or (trial is not None and not self._at_once):
            verdict.trusted = True
            return TrustedCall(call, verdict, how)
        return TrialCall(call, verdict, how, exact=not self._allow)


class RecomputedCall:
    """One call of a layer inside of torch's checkpoint, from where it begins to `end`.

    What a generator runs to its `yield` and after it are the two halves of that checkpoint.

    is_trial: whether it keeps all, to be compared.
    """

    is_trial = False

    def __init__(self, call: Call, contexts: Callable[[], Contexts]) -> None:
        self._call = call
        self._halves = checkpoint_halves(call.again, True, contexts, "default", False, True, *call.leaves)
        next(self._halves)

    def end(self, output: object) -> None:
        """The layer has ended; without an output it has failed."""
        next(self._halves, None)


class TrustedCall(RecomputedCall):
    """A call of a kind that has been looked at, or is just being."""

    def __init__(self, call: Call, verdict: Verdict, how: How) -> None:
        self._verdict = verdict
        self._how = how
        super().__init__(call, self._contexts)

    def end(self, output: object) -> None:
        """Raises NotRepeatable where the layer changed what it must not."""
        super().end(output)
        if output is not None and (why := self._call.changed()):
            self._verdict.exclude(why)
            raise NotRepeatable(self._verdict.layer, why)

    def _contexts(self) -> Contexts:
        if self._how == "full":
            return nullcontext(), nullcontext()
        keep = KeepResults(self._call.forward.pack, self._verdict.wanted)
        return keep, GiveResults(keep.kept)


class TrialCall(RecomputedCall):
    """A call that keeps all, is computed again, and is compared bit by bit. Backward gets what was kept.

    running: the layer's forward goes on.
    """

    is_trial = True

    def __init__(self, call: Call, verdict: Verdict, how: How, *, exact: bool) -> None:
        self._verdict = verdict
        self._how = how
        self._exact = exact
        self._watch = Watch(None if how == "full" else call.forward.pack, is_checkpoint)
        self._saves = 0
        self._left = 0
        self._compared = False
        self._random = _host_random()
        self._buffers = {name: each.detach().clone() for name, each in call.module.named_buffers()}
        self.running = True
        verdict.trial = weakref.ref(self)
        super().__init__(call, self._contexts)

    def end(self, output: object) -> None:
        super().end(output)
        self.running = False
        watch, verdict = self._watch, self._verdict
        verdict.wanted = watch.worth_keeping(self._saves)
        for number in watch.kept.keys() - verdict.wanted:
            del watch.kept[number]
        seen = None if output is None else watch.why or self._seen_in(output)
        self._buffers.clear()
        watch.unset.clear()
        changed = self._call.changed()  # lets go of the inputs, too
        if output is None:
            verdict.trial = None
        elif why := seen or changed:
            verdict.exclude(why)

    def _contexts(self) -> Contexts:
        return _Both(self._watch, self), nullcontext() if self._how == "full" else GiveResults(self._watch.kept)

    def hooks(self) -> saved_tensors_hooks:
        """To be entered where those of the checkpoint are the innermost."""
        found = top_saving_hooks(False)
        if found is None:
            raise RuntimeError("torch's checkpoint has no hooks of its own: this torch is not supported")
        drop, compute = found
        return saved_tensors_hooks(functools.partial(self._pack, drop), functools.partial(self._unpack, compute))

    @uninterrupted
    def _pack(self, drop: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Twice:
        self._saves += 1
        self._watch.saves = self._saves
        self._left += 1
        compared = not self._watch.means_nothing(tensor)
        return Twice(self, drop(tensor), self._call.forward.pack(tensor), compared)

    def _unpack(self, compute: Callable[[Any], torch.Tensor], twice: Twice) -> torch.Tensor:
        verdict = self._verdict
        if not verdict.excluded:
            again = compute(twice.dropped)
            right = self._call.forward.unpack(twice.kept)
            self._compared = True
            if self._exact and twice.compared and not same_bits(right, again):
                shape = tuple(right.shape)
                verdict.exclude(f"a {right.dtype} tensor of shape {shape} has other values the second time")
                if verdict.trusted:
                    raise NotRepeatable(verdict.layer, str(verdict.excluded))
            return right
        return self._call.forward.unpack(twice.kept)

    def gone(self) -> None:
        """One of what was saved is not needed any more. With the last one the layer is known."""
        self._left -= 1
        if not self._left and self._compared:
            verdict = self._verdict
            if verdict.under_way is self:
                verdict.trial = None
            if not verdict.excluded:
                verdict.equal.add(self._call.module)

    def _seen_in(self, output: object) -> str | None:
        """Why the layer is excluded, by what it has done."""
        # Batch norm changes its statistics and no version tells.
        for name, each in self._call.module.named_buffers():
            if name not in self._buffers or not same_bits(self._buffers[name], each):
                return f"it changes its buffer {name}"
        if _host_random() != self._random:
            return "it draws random numbers of Python or numpy, which nobody restores"
        if any(node.name() == REENTRANT_CHECKPOINT for node in _nodes(output, self._call.leaves)):
            return CHECKPOINT_INSIDE
        return None


class Twice:
    """What autograd keeps of a tensor in a trial: what the checkpoint makes of it, and the tensor.

    compared: its value means something, and has to come again.
    """

    __slots__ = ("compared", "dropped", "kept", "trial")

    def __init__(self, trial: TrialCall, dropped: Any, kept: Saved, compared: bool) -> None:
        self.trial = trial
        self.dropped = dropped
        self.kept = kept
        self.compared = compared

    @uninterrupted
    def __del__(self) -> None:
        self.trial.gone()


class _Both(ExitStack):
    """The watch over a layer's operators, and a trial's hooks above those of the checkpoint."""

    def __init__(self, watch: Watch, trial: TrialCall) -> None:
        super().__init__()
        self._watch, self._trial = watch, trial

    def __enter__(self) -> _Both:
        self.enter_context(self._trial.hooks())
        self.enter_context(self._watch)
        return self


class Call:
    """A layer, what it is called with, and the versions of what it must not change."""

    def __init__(
        self, forward: ForwardPass, layer: int, module: Module, leaves: Sequence[Any], structure: Any
    ) -> None:
        self.forward = forward
        self.layer = layer
        self.module = module
        self.leaves = leaves
        self._structure = structure
        self._buffers = {name: (each, _version(each)) for name, each in module.named_buffers()}
        self._inputs = [(each, _version(each)) for each in leaves if isinstance(each, torch.Tensor)]

    def again(self, *leaves: Any) -> None:
        """Computes the layer again."""
        self.forward.begin_backward(self.layer)
        args, named = tree_unflatten(leaves, self._structure)
        self.module(*args, **named)

    def changed(self) -> str | None:
        """What the layer has changed that it would find changed. To be asked once, when it has ended."""
        buffers, self._buffers = self._buffers, {}
        inputs, self._inputs, self.leaves = self._inputs, [], ()
        now = dict(self.module.named_buffers())
        for name, (each, version) in buffers.items():
            if now.get(name) is not each or _version(each) != version:
                return f"it changes its buffer {name}"
        if any(_version(each) != version for each, version in inputs):
            return "it changes its input"
        return None


@dataclass
class Verdict:
    """What is known of one kind of calls.

    layer: its type. excluded: why it is never computed again. equal: the layers that came out the same. wanted:
    the results to keep, by their numbers. trusted: there were calls that counted on it. trial: the last one.
    """

    layer: str
    excluded: str | None = None
    equal: weakref.WeakSet[Module] = field(default_factory=weakref.WeakSet)
    wanted: Mapping[int, Operation] = field(default_factory=dict)
    trusted: bool = False
    trial: weakref.ref[TrialCall] | None = None

    @property
    def under_way(self) -> TrialCall | None:
        """The trial that is not over, and may never be: then it goes with its graph."""
        return None if self.trial is None else self.trial()

    def exclude(self, why: str) -> None:
        self.excluded = why
        _log.warning("%s is not computed again in backward, and keeps what it saves: %s", self.layer, why)


class Kind(NamedTuple):
    """What has to be the same for what was seen of one call to hold for another."""

    how: How
    type: type[Module]
    training: bool
    weights: tuple[object, ...]
    inputs: tuple[object, ...]
    autocast: tuple[object, ...]

    @classmethod
    def of(cls, how: How, module: Module, leaves: Iterable[object]) -> Kind:
        weights = tuple((each.shape, each.dtype, each.requires_grad) for each in module.parameters())
        inputs = tuple(map(_described, leaves))
        devices = {each.device.type for each in leaves if isinstance(each, torch.Tensor)} | {"cpu"}
        autocast = tuple(
            (kind, torch.get_autocast_dtype(kind)) for kind in sorted(devices) if torch.is_autocast_enabled(kind)
        )
        return cls(how, type(module), module.training, weights, inputs, autocast)


# Sequences of ever other lengths are ever other kinds.
_MOST_KINDS = 1000

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same, bit by bit. Waits for the device."""
    mine, its = list(plain_tensors(one.detach())), list(plain_tensors(other.detach()))
    return len(mine) == len(its) and all(map(_same_bits, mine, its))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # which nobody counts there


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.layout is not torch.strided or one.is_quantized:
        return False
    same_memory = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    # A dry run has no values: it finds no difference, as all that it reads is 0. torch.equal would find one.
    return same_memory or not bool(torch.ne(_bits(one), _bits(other)).any())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.view(whole)


def _described(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return type(leaf), leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
    return leaf if isinstance(leaf, int | float | str | None) else type(leaf)


def _host_random() -> object:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else repr(numpy.random.get_state())


def _nodes(output: object, inputs: Sequence[object]) -> Iterator[Any]:
    """The nodes of autograd's graph between a layer's inputs and its output."""
    seen = {each.grad_fn for each in inputs if isinstance(each, torch.Tensor)}
    left = [each.grad_fn for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        left += [following for following, _ in node.next_functions]
