"""Layers that keep little of what they save, and are computed again when backward comes to them."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, get_args

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from ..device.torch_private import (
    DYNAMO,
    REENTRANT_CHECKPOINT,
    CheckpointError,
    checkpoint_halves,
    innermost_transform,
    top_saving_hooks,
    tree_flatten,
    tree_leaves,
)
from ..errors import ChangedTensor, NotRepeatable
from ..ground.arguments import one_of
from ..ground.interrupts import uninterrupted
from ..ground.wrappers import plain_tensors
from ..policies.actions import How
from .call import Call, Kind, contents, holds_more, host_random, parts_of
from .hooks import ForwardPass, Saved, is_checkpoint, saving_hook
from .operators import (
    CHECKPOINT_INSIDE,
    WITHOUT_CHECKPOINT,
    GiveResults,
    KeepResults,
    Operation,
    Watch,
    tensors_among,
)

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
        one_of("recompute", wanted, ("auto", "allow", False))
        self._allow = wanted == "allow"
        self._forbid = wanted is False
        self._at_once = at_once
        self._kinds: dict[Kind, Verdict] = {}
        self._told = False  # that layers are in checkpoints of the user's

    def check(self, how: How | None) -> How | None:
        """What a context is asked for. Raises ValueError."""
        one_of("recompute", how, (*get_args(How), None))
        if how is not None and self._forbid:
            raise ValueError(f"recompute={how!r} is asked of a TieringManager(recompute=False)")
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
            self._tell_of_checkpoint(module)
            return None
        _import_what_compiles()
        leaves, structure = tree_flatten((tuple(args), dict(named)))
        parts = parts_of(module)
        kind = Kind.of(how, parts, leaves)
        verdict = self._kinds.setdefault(kind, Verdict(type(module).__name__))
        if len(self._kinds) > _MOST_KINDS:
            self._kinds.pop(next(iter(self._kinds)), None)
        trial = verdict.under_way
        if verdict.excluded or (trial is not None and trial.running):
            return None
        call = Call(functools.partial(forward.begin_backward, layer), parts, leaves, structure)
        if call.compiled:
            how = "full"
        if module in verdict.equal or (trial is not None and not self._at_once):
            verdict.trusted = True
            return TrustedCall(forward, call, verdict, how, known=module in verdict.equal)
        return TrialCall(forward, call, verdict, how, exact=not self._allow)

    def _tell_of_checkpoint(self, module: Module) -> None:
        if is_checkpoint() and not self._told:
            self._told = True
            _log.warning(
                "%s runs inside of a checkpoint. It stays as it is, and its inputs move. %s. It is said once",
                *(type(module).__name__, WITHOUT_CHECKPOINT),
            )


class RecomputedCall:
    """One call of a layer inside of torch's checkpoint, from where it begins to `end`.

    What a generator runs to its `yield` and after it are the two halves of that checkpoint.

    is_trial: whether it keeps all, to be compared. results: where a trial was "full", the bytes that "cheap" would
    keep, and at most beside what the layer saves; known when it has ended.
    """

    is_trial = False
    results = 0, 0

    def __init__(self, forward: ForwardPass, call: Call, verdict: Verdict, how: How) -> None:
        self._forward = forward
        self._call = call
        self._verdict = verdict
        self._how = how
        self._halves = checkpoint_halves(call.again, True, self._contexts, "default", False, True, *call.leaves)
        next(self._halves)

    def end(self, output: object) -> None:
        """The layer has ended; without an output it has failed. Raises NotRepeatable."""
        next(self._halves, None)

    def _contexts(self) -> Contexts:
        """What is around the layer the first time, and the second."""
        raise NotImplementedError

    def _refuse(self, why: str, error: Exception | None = None) -> NoReturn:
        self._verdict.exclude(why)
        raise NotRepeatable(self._verdict.layer, why) from error


class TrustedCall(RecomputedCall):
    """A call of a kind that has been looked at, or is just being. known: this very layer has had its trial."""

    def __init__(self, forward: ForwardPass, call: Call, verdict: Verdict, how: How, *, known: bool) -> None:
        self._known = known
        self._look: Look | None = None
        super().__init__(forward, call, verdict, how)

    def end(self, output: object) -> None:
        super().end(output)
        look, self._look = self._look, None
        seen = None if look is None or output is None else look.why(output)
        changed = self._call.changed()
        if output is not None and (why := seen or changed):
            self._refuse(why)

    def _contexts(self) -> Contexts:
        if self._how == "full":
            return Within(self._around), nullcontext()
        keep = KeepResults(self._forward.pack, self._verdict.wanted)
        return Within(lambda: [*self._around(), keep]), GiveResults(keep.kept)

    def _around(self) -> Sequence[AbstractContextManager[Any]]:
        drop, compute = checkpoint_hooks()
        hooks = saved_tensors_hooks(drop, functools.partial(self._unpack, compute))
        if self._known:
            return [hooks]
        watch = Watch(None, lambda: is_checkpoint() and saving_hook() is not drop, self._forward.settle)
        self._look = Look(self._call, watch)
        return [hooks] if self._call.compiled else [hooks, watch]

    def _unpack(self, compute: Callable[[Any], torch.Tensor], dropped: Any) -> torch.Tensor:
        try:
            return compute(dropped)
        except _NOT_AGAIN as error:
            self._refuse(_reason(error), error)


class TrialCall(RecomputedCall):
    """A call that keeps all, is computed again, and is compared bit by bit. Backward gets what was kept.

    running: the layer's forward goes on.
    """

    is_trial = True

    def __init__(self, forward: ForwardPass, call: Call, verdict: Verdict, how: How, *, exact: bool) -> None:
        self._exact = exact
        self._watch = Watch(None if how == "full" else forward.pack, is_checkpoint, forward.settle)
        self._look: Look | None = Look(call, self._watch)
        self._left = 0
        self._compared = False
        self.running = True
        verdict.trial = weakref.ref(self)
        super().__init__(forward, call, verdict, how)

    def end(self, output: object) -> None:
        super().end(output)
        self.running = False
        watch, verdict = self._watch, self._verdict
        self.results = watch.would_keep()
        verdict.wanted = watch.worth_keeping()
        for number in watch.kept.keys() - verdict.wanted:
            del watch.kept[number]
        look, self._look = self._look, None
        seen = None if look is None or output is None else look.why(output)
        changed = self._call.changed()  # lets go of the inputs, too
        if output is None:
            verdict.trial = None
        elif watch.disturbs is not None:
            self._refuse(watch.disturbs)
        elif why := seen or changed:
            verdict.exclude(why)

    def _contexts(self) -> Contexts:
        return Within(self._around), nullcontext() if self._how == "full" else GiveResults(self._watch.kept)

    def _around(self) -> Sequence[AbstractContextManager[Any]]:
        drop, compute = checkpoint_hooks()
        hooks = saved_tensors_hooks(functools.partial(self._pack, drop), functools.partial(self._unpack, compute))
        return [hooks] if self._call.compiled else [hooks, self._watch]

    @uninterrupted
    def _pack(self, drop: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Twice:
        self._watch.note_save(tensor)
        self._left += 1
        unwritten = any(tensor is each or tensor.data_ptr() == each.data_ptr() for each in self._watch.unwritten)
        return Twice(self, drop(tensor), self._forward.pack(tensor), exact=self._exact and not unwritten)

    def _unpack(self, compute: Callable[[Any], torch.Tensor], twice: Twice) -> torch.Tensor:
        if self._verdict.excluded:
            return self._forward.unpack(twice.kept)
        try:
            again = compute(twice.dropped)
        except torch.OutOfMemoryError:
            raise  # it tells nothing of the layer
        except Exception as error:
            self._differs(_reason(error), error)
            return self._forward.unpack(twice.kept)
        right = self._forward.unpack(twice.kept)  # not before: the layer needs the room while it is computed
        self._compared = True
        if twice.exact and not same_bits(right, again):
            self._differs(f"a {right.dtype} tensor of shape {tuple(right.shape)} has other values the second time")
        return right

    def _differs(self, why: str, error: Exception | None = None) -> None:
        if self._verdict.trusted:
            self._refuse(why, error)
        self._verdict.exclude(why)

    def gone(self) -> None:
        """One of what was saved is not needed any more. With the last one the layer is known."""
        self._left -= 1
        if not self._left and self._compared:
            verdict = self._verdict
            if verdict.under_way is self:
                verdict.trial = None
            if not verdict.excluded:
                verdict.equal.add(self._call.module)


class Look:
    """What is looked at while a layer runs that is not known: its operators, buffers, and random numbers."""

    def __init__(self, call: Call, watch: Watch) -> None:
        self.watch = watch
        self._call = call
        self._leaves = call.leaves
        self._random = host_random()
        self._arguments = [(each, contents(each)) for each in call.leaves if holds_more(each)]
        # Batch norm changes its statistics and no version tells.
        self._buffers = {name: each.detach().clone() for name, each in call.module.named_buffers()}

    def why(self, output: object) -> str | None:
        """The reason to exclude the layer, which has come to this output."""
        if self.watch.why is not None:
            return self.watch.why
        for name, each in self._call.module.named_buffers():
            if name not in self._buffers or not same_bits(self._buffers[name], each):
                return f"it changes its buffer {name}"
        for argument, before in self._arguments:
            if contents(argument) != before:
                cache = "A model of transformers fills no cache of keys and values with use_cache=False"
                return f"it changes its argument, a {type(argument).__name__}. {cache}"
        if host_random() != self._random:
            return "it draws random numbers of Python or numpy, which nobody restores"
        if any(node.name() == REENTRANT_CHECKPOINT for node in _nodes(output, self._leaves)):
            return CHECKPOINT_INSIDE
        return None


class Twice:
    """What autograd keeps of a tensor in a trial: what the checkpoint makes of it, and the tensor.

    exact: the two have to be the same, bit by bit.
    """

    __slots__ = ("dropped", "exact", "kept", "trial")

    def __init__(self, trial: TrialCall, dropped: Any, kept: Saved, *, exact: bool) -> None:
        self.trial = trial
        self.exact = exact
        self.dropped = dropped
        self.kept = kept

    @uninterrupted
    def __del__(self) -> None:
        self.trial.gone()


class Within(ExitStack):
    """Contexts that are made when this one is entered, in which the checkpoint's hooks are the innermost."""

    def __init__(self, make: Callable[[], Iterable[AbstractContextManager[Any]]]) -> None:
        super().__init__()
        self._make = make

    def __enter__(self) -> Within:
        for each in self._make():
            self.enter_context(each)
        return self


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


# Sequences of ever other lengths are ever other kinds.
_MOST_KINDS = 1000

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


# What the second computation ends with where the layer is at fault, or what became of its input.
_NOT_AGAIN = (ChangedTensor, CheckpointError, NotRepeatable)


def checkpoint_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Of the checkpoint that has just been entered: what it makes of a tensor, and the tensor computed again."""
    found = top_saving_hooks(False)
    if found is None:
        raise RuntimeError("torch's checkpoint has no hooks of its own: this torch is not supported")
    return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same, bit by bit. Waits for the device."""
    mine, its = list(_parts(one.detach())), list(_parts(other.detach()))
    return len(mine) == len(its) and all(map(_same_bits, mine, its))


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    for each in plain_tensors(tensor):
        if each.layout is torch.sparse_coo:
            yield from (each._indices(), each._values())
        else:
            yield each


def _reason(error: Exception) -> str:
    """Why a layer cannot be computed again, by what that ended with."""
    if isinstance(error, NotRepeatable):
        return error.why
    if isinstance(error, ChangedTensor):
        return "its input was changed between its forward and its backward"
    if isinstance(error, CheckpointError):
        if "already unpacked" in str(error):
            return "its backward asks twice for what it has saved, as where it reads ctx.saved_tensors twice"
        return "it saves other tensors the second time"
    return f"the second time it ends with {type(error).__name__}: {error}"


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.layout is not torch.strided or one.is_quantized:
        return False
    same_memory = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    if same_memory or not one.numel():
        return True
    mine, its = _bits(one), _bits(other)
    order = sorted(range(mine.dim()), key=mine.stride, reverse=True)  # what is dense lies in a row then
    mine, its = mine.permute(order).flatten(), its.permute(order).flatten()
    differ = torch.zeros((), dtype=torch.bool, device=one.device)
    for part, its_part in zip(torch.split(mine, _AT_ONCE), torch.split(its, _AT_ONCE), strict=True):
        # A dry run has no values: it finds no difference, as all that it reads is 0. torch.equal would find one.
        differ |= torch.ne(part, its_part).any()
    return not bool(differ)


# So many numbers are compared in one go: what tells where they differ takes memory, too.
_AT_ONCE = 1 << 24


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.view(whole)


def _import_what_compiles() -> None:
    """The checkpoint imports it. An import keeps the frames that it began in until the garbage is collected: it
    begins on a thread of its own, and not in a forward."""
    if DYNAMO not in sys.modules:
        thread = threading.Thread(target=importlib.import_module, args=(DYNAMO,))
        thread.start()
        thread.join()


def _nodes(output: object, inputs: Sequence[object]) -> Iterator[Any]:
    """The nodes of autograd's graph between a layer's inputs and its output."""
    seen = {each.grad_fn for each in tensors_among(inputs)}
    left = [each.grad_fn for each in tensors_among(tree_leaves(output))]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        left += [following for following, _ in node.next_functions]
