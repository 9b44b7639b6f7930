"""Steps that are made beside the next forward, each bucket before its first use."""

from __future__ import annotations

import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..device.device import Stream
from ..device.torch_private import any_compiled, in_mode, outside_of_modes, storage_id, storage_uses
from ..ground.harmless import GET_GRADIENT, SET_GRADIENT
from ..ground.interrupts import uninterrupted
from .bucket import Bucket
from .gradient_hooks import GradientHooks, Hearing
from .guarded import can_guard, end_guard, put_guard
from .layout import Param, spread_of
from .pipeline import Pipeline
from .separable import StepChoice
from .stepping import Stepping

_log = logging.getLogger("tiered_mem.optimizer")

# The tensor has its storage, and so has Python, where somebody asks.
_ALONE = 2
_Kind = tuple[torch.dtype, torch.device]


class StepInForward(Stepping):
    """In step(), steps what is on the device already. Each other bucket is stepped when something of it is used.

    Until then its parameters and gradients have a guard, and a parameter has no elements: who looks at one has the
    bucket stepped first, and who looks below Python finds nothing, rather than an old value. States come to the
    device in backward already, as far as there is memory that is not needed for anything else.
    """

    overlap = "forward"

    def __init__(self, optimizer: torch.optim.Optimizer, choice: StepChoice, pipeline: Pipeline) -> None:
        super().__init__(optimizer, choice, pipeline)
        self._hooks = GradientHooks()
        self._waiting: dict[Bucket, _Waiting] = {}
        self._asking: Callable[[], object] = lambda: None
        self._owner: object = None  # lives while anything waits
        self._stream: Stream | None = None
        # How often each gradient has come by now, and had come when the last step was made.
        self._seen: Counter[Param] = Counter()
        self._times: Counter[Param] = Counter()
        self._told = False
        self._waited: bool | None = None  # whether anything has in the last step in which it might have
        self._to_come = 0  # bytes of gradients
        self._ahead: deque[Bucket] = deque()
        self._used: dict[Bucket, None] = {}  # in the order in which forward used them last

    def asked(self, owner: object, *, at_once: bool) -> Stepping:
        self.finish()
        self._asking = weakref.ref(owner)
        return self

    def step(self) -> None:
        self._choice.check_gradients()
        stream = self._stream = self._pipeline.device.current_stream()
        nothing: dict[_Kind, torch.Tensor] = {}
        # The first of those that have to come shows errors, and what a step makes of a group's values. Forward
        # begins with it, so that nothing would hide its way.
        first, wait = True, self._may_wait()
        with self.place.used(), self.stepping() as step:
            for bucket in self._in_order():
                changing = {param for param in bucket.params if param.grad is not None}
                if first or not (wait and self._can_wait(bucket, changing)):
                    first = first and (bucket.stays or not bucket.away(changing))
                    step.take(bucket, bucket.params, changing, ())
                    continue
                # The others may have a gradient by then, and their groups may count steps.
                if others := [param for param in bucket.params if param not in changing]:
                    step.take(bucket, others, frozenset(), ())
                self._waiting[bucket] = _Waiting(self, bucket, changing, stream, nothing)
        for waiting in self._waiting.values():
            waiting.begin()
        if self._waiting or not first:
            self._waited = bool(self._waiting)
            self._tell_none_waits()
        self._owner = self._asking()
        self._go_on()

    def whole(self, what: str) -> None:
        self.finish()

    def finish(self) -> None:
        for bucket in list(self._waiting):
            self.take(bucket)

    @property
    def coming(self) -> Collection[Bucket]:
        return self._waiting or self._in_order()

    @property
    def beside(self) -> str | None:
        return None if self._waited is False else self.overlap

    @property
    def settled(self) -> bool:
        return self._waited is not None

    def no_step(self) -> None:
        if not self._waiting:
            self._pipeline.drop()
            self._begin_to_look()

    def gradient(self, param: Param) -> None:
        self.finish()  # what forward has not used
        if not self._seen[param]:
            self._to_come -= param.nbytes
        self._seen[param] += 1
        if self._stream is None or self._seen[param] != self._times[param]:
            return
        room = self._pipeline.device.below_peak() - self._to_come
        with suppress(torch.OutOfMemoryError):
            self._pipeline.bring_ahead(self._ahead, room, self._stream)
        if not self._to_come:
            self._pipeline.prefetch_first()

    def begin_anew(self) -> None:
        super().begin_anew()
        for waiting in self._waiting.values():
            waiting.end()
        self._waiting.clear()
        self._end()

    def learn(self, params: Iterable[Param], hearing: Hearing) -> None:
        self._times = self._seen
        self._begin_to_look()
        self._hooks.watch(params, hearing)

    def close(self) -> None:
        self._hooks.close()
        if self.broken is None:
            self.finish()
        self.begin_anew()

    def take(self, bucket: Bucket) -> None:
        """Steps a bucket that waits, if it still does. By whoever has the lock."""
        if bucket in self._waiting:
            with outside_of_modes():
                self._take(bucket, self._waiting[bucket])

    def _take(self, bucket: Bucket, waiting: _Waiting) -> None:
        device, now = self._pipeline.device, self._pipeline.device.current_stream()
        params = [param for param in bucket.params if param in waiting.changing]
        following = [(each, self._waiting[each].changing) for each in self._waiting if each is not bucket]
        try:
            with device.on(waiting.stream), waiting.as_noted(), self.place.used(), self.stepping() as step:
                step.take(bucket, params, waiting.changing, following)
        except BaseException:
            if self.broken is not None:
                self.begin_anew()
            raise
        if now.stream_id != waiting.stream.stream_id:
            now.wait_event(waiting.stream.record_event())
        del self._waiting[bucket]
        self._used.pop(bucket, None)
        self._used[bucket] = None
        with device.on(waiting.stream):
            self._go_on()

    def _go_on(self) -> None:
        self._pipeline.bring([(bucket, waiting.changing) for bucket, waiting in self._waiting.items()])
        if not self._waiting:
            self._end()

    def _end(self) -> None:
        self.open = self._owner = None
        self._pipeline.drop()

    def _begin_to_look(self) -> None:
        self._seen = Counter()
        self._ahead = deque(self._in_order())
        self._to_come = sum(param.nbytes for param in self._times)

    def _in_order(self) -> list[Bucket]:
        """As forward uses them, as far as it has ever waited for one."""
        place = {bucket: place for place, bucket in enumerate(self._used)}
        return sorted(self._pipeline.buckets, key=lambda bucket: place.get(bucket, -1))

    def _may_wait(self) -> bool:
        """Whether a bucket may be stepped later than this."""
        if not any_compiled():
            # A step in such a mode comes to other values than one outside.
            return not in_mode()
        if not self._told:
            self._told = True
            _log.info(
                "torch.compile is in use, which would compile a model anew for parameters that wait: %s is stepped "
                "in step()",
                self._name,
            )
        return False

    def _tell_none_waits(self) -> None:
        if not (self._waited or self._told or len(self._pipeline.buckets) == 1):
            self._told = True
            _log.info(
                "%s is stepped in step(): somebody could use each of its parameters or gradients without a word, "
                "as they are of a type of its own, such as FSDP2's, or share their memory",
                self._name,
            )

    def _can_wait(self, bucket: Bucket, changing: Set[Param]) -> bool:
        """Whether it is not there yet, and nobody can use anything of it without a word."""
        tensors = [tensor for param in changing for tensor in (param, param.grad) if tensor is not None]
        return bucket.away(changing) and all(map(_is_alone, tensors))


class _Waiting:
    """A bucket that is to be stepped before its next use: the guard of its parameters and gradients.

    changing: its parameters that have a gradient. stream: on which it is stepped. nothing: tensors without
    elements, by type, that all share.
    """

    def __init__(
        self,
        stepping: StepInForward,
        bucket: Bucket,
        changing: Set[Param],
        stream: Stream,
        nothing: dict[_Kind, torch.Tensor],
    ) -> None:
        self._stepping = stepping
        self._bucket = bucket
        self.changing = changing
        self.stream = stream
        self._nothing = nothing
        self._gradients = {param: param.grad for param in changing}
        self._values = {param: param.detach() for param in changing}
        # Autograd notes a parameter's shape when a graph first has it, which may be while it has no elements.
        self._edges: list[GradientEdge] = [get_gradient_edge(param) for param in changing if param.requires_grad]

    def begin(self) -> None:
        """Parameters and gradients have a guard."""
        for param, gradient in self._gradients.items():
            kind = param.dtype, param.device
            if kind not in self._nothing:
                # Shapes that broadcast with any other would let a wrong result pass for right.
                self._nothing[kind] = torch.empty((0,) * 8, dtype=param.dtype, device=param.device)
            param.data = self._nothing[kind]
            put_guard(param, self)
            if gradient is not None:
                put_guard(gradient, self)

    def end(self) -> None:
        """They are as they were."""
        for param, gradient in self._gradients.items():
            end_guard(param)
            if gradient is not None:
                end_guard(gradient)
            param.data = self._values[param]

    @contextmanager
    def as_noted(self) -> Iterator[None]:
        """Inside, parameters have the gradients that they had in step(); and afterwards those that they have now.

        With an error that leaves them unchanged, they go on waiting.
        """
        self.end()
        now = {param: param.grad for param in self.changing}
        for param, gradient in self._gradients.items():
            param.grad = gradient
        try:
            yield
        except BaseException:
            for param, gradient in now.items():
                param.grad = gradient
            if self._stepping.broken is None:
                self.begin()
            raise
        for param, gradient in now.items():
            param.grad = gradient

    @uninterrupted
    def asked(self, tensor: torch.Tensor, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if function == GET_GRADIENT or (function == SET_GRADIENT and args[1] is None):
            return
        with self._stepping.lock:
            self._stepping.take(self._bucket)

    def shape_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._values[tensor] if isinstance(tensor, torch.nn.Parameter) else tensor


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether a guard of the tensor sees all uses of its memory."""
    if spread_of(tensor) or not can_guard(tensor) or tensor.is_inference():
        return False
    storage = tensor.untyped_storage()  # torch 2.9 counts Python's only while somebody has it
    return storage_uses(storage_id(storage)) <= _ALONE
