"""Steps that are made in backward, each bucket as soon as its gradients are final."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from ..device.device import Device, Event, Stream
from ..device.torch_private import call_after_backward, outside_of_modes
from ..errors import OverlapRefused
from ..ground.harmless import GET_GRADIENT, SET_GRADIENT
from ..ground.interrupts import uninterrupted
from ..ground.wrappers import plain_tensors
from .bucket import Bucket
from .gradient_hooks import GradientHooks, Hearing
from .guarded import can_guard, end_guard, put_guard
from .layout import Param, spread_of
from .pipeline import Pipeline
from .separable import StepChoice
from .stepping import OpenStep, Stepping

_log = logging.getLogger("tiered_mem.optimizer")

# Of a gradient, the elements that are compared with what they are when the step comes.
_SAMPLE = 1024
_INSTEAD = 'overlap="forward" has the gradients as they are without an overlap'
_TWICE = (
    "a parameter that had been stepped in backward got another gradient. With several backwards in a step call "
    "optimizer.last_backward() before the last of them"
)


class Ready(NamedTuple):
    """A bucket to be stepped now. changing: its parameters. following: buckets that will be, in this order."""

    bucket: Bucket
    changing: Set[Param]
    following: Collection[tuple[Bucket, Set[Param]]]


class StepInBackward(Stepping):
    """Steps each bucket in the last backward of a step, and the rest in step().

    keep_gradients: they stay after their parameters have been stepped. instead: makes the steps where the first one
    shows that it cannot be like this; None has that raise.
    """

    overlap = "backward"
    last_first = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        choice: StepChoice,
        pipeline: Pipeline,
        *,
        keep_gradients: bool,
        instead: Stepping | None = None,
    ) -> None:
        super().__init__(optimizer, choice, pipeline)
        self._final = FinalGradients(self._name, pipeline.device, keep_gradients=keep_gradients)
        self._hooks = GradientHooks()
        self._instead = instead
        self._scaled: str | None = None
        # Whether this step may begin before all its gradients are known.
        self._early: bool | None = None

    def gradient(self, param: Param) -> None:
        final = self._final
        if self.open is not None and param in self.open.stepped:
            raise self.interrupt(self.open, _TWICE)
        if self._early is None and final.active:
            self._early = self._choice.early_now(self._pipeline.buckets)
            if self._early:
                with outside_of_modes(), suppress(torch.OutOfMemoryError):
                    self._pipeline.bring(final.coming)
        ready = final.note(param)
        if ready is None or not self._early:
            return
        with outside_of_modes():
            with self.place.used(), self.stepping() as step:
                if (name := step.changed()) is not None:
                    raise OverlapRefused(_changed(name))
                params = [param for param in ready.bucket.params if param in ready.changing]
                step.take(ready.bucket, params, ready.changing, ready.following)
                final.stepped(params)
            self._pipeline.bring(final.coming)

    def asked(self, owner: object, *, at_once: bool) -> Stepping:
        final, step = self._final, self.open
        if at_once:
            self.whole("a step with a closure or with arguments of its own")
        final.step_begins()
        if step is not None:
            if (reason := self._undone(step)) is not None:
                raise self.interrupt(step, reason)
            return self
        reason = self._scaled or final.refusal()
        if reason is None and (others := self._hooks.others()):
            reason = f"{others} parameters have hooks of others that look at their gradients"
        if self._instead is not None and (reason or final.several):
            return self._leave(self._instead, reason or "of several backwards nobody says which is the last")
        if reason is not None:
            final.forget()
            raise OverlapRefused(f'{reason}, so that {self._name} cannot have overlap="backward": {_INSTEAD}')
        self._instead = None  # from now on there may be gradients that are gone
        return self

    def _undone(self, step: OpenStep) -> str | None:
        """Why a step that has begun cannot come to its end."""
        if not self._final.whole:
            return "the backward in which its first buckets were stepped did not come to its end"
        if not self._final.keeps and any(param.grad is not None for param in step.stepped):
            return _TWICE
        if self._final.kept_changed():
            return "gradients were changed between backward and step, which had used them"
        return None if (name := step.changed()) is None else _changed(name)

    def _leave(self, instead: Stepping, reason: str) -> Stepping:
        """Ends this, of which no step was made yet, for another way to step."""
        _log.info("%s has overlap=%r: %s", self._name, instead.overlap, reason)
        self.close()
        instead.lock, instead.place = self.lock, self.place
        self._pipeline.buckets.reverse()
        return instead

    def whole(self, what: str) -> None:
        if self.open is not None:
            raise OverlapRefused(
                f"{what} came after a part of {self._name} was stepped in backward: call step() before. {_INSTEAD}"
            )

    def no_step(self) -> None:
        self.whole("zero_grad()")
        self._pipeline.drop()
        self.begin_anew()

    def refuse_scaler(self) -> None:
        if self._instead is None:
            raise OverlapRefused(
                f"a scaler divides gradients after backward, in which {self._name} is stepped already: {_INSTEAD}"
            )
        self._scaled = "a scaler divides gradients after backward"

    @property
    def coming(self) -> Collection[Bucket]:
        return [bucket for bucket, _ in self._final.coming] or self._pipeline.buckets

    @property
    def settled(self) -> bool:
        return self._final.knows

    def last_backward(self) -> None:
        self._final.announce()

    def begin_anew(self) -> None:
        super().begin_anew()
        self._early = None
        self._final.step_begins()
        self._final.forget()
        self._final.expect(self._pipeline.buckets)

    def learn(self, params: Iterable[Param], hearing: Hearing) -> None:
        self._early = None
        self._final.step_ends(self._pipeline.buckets)
        self._hooks.watch(params, hearing)

    def close(self) -> None:
        self._hooks.close()
        self._final.close()


class FinalGradients:
    """Knows from the step before which gradients come, in which order, and so which are final. Never steps itself.

    In the first step it looks on. What changes gradients between backward and step shows there, and is refused.
    In a step of several backwards it does nothing but look on until `announce` says which of them is the last.

    name: of the optimizer. keeps: gradients stay after their parameters have been stepped.
    whole: whether the backward in which parameters were stepped has come to its end.
    """

    def __init__(self, name: str, device: Device, *, keep_gradients: bool) -> None:
        self._name = name
        self._device = device
        self.keeps = keep_gradients
        self._seen: list[Param] = []
        self._samples: dict[Param, _Sample] = {}
        self._times: Counter[Param] | None = None  # how often each gradient came, and was final after that
        self._announced = self._by_word = self._told = False
        self._waiting: dict[Bucket, Counter[Param]] = {}
        self._expected: dict[Bucket, set[Param]] = {}
        self._bucket_of: dict[Param, Bucket] = {}
        self._guarded: list[Param] = []
        self._held: list[torch.Tensor] = []
        self._kept: list[tuple[Param, torch.Tensor | None, int | None]] = []
        self._streams: dict[int, tuple[Stream, Event]] = {}
        self.order: list[Param] = []
        self.whole = True

    def announce(self) -> None:
        """The next backward is the last of its step."""
        if not self._by_word:
            self._by_word, self._times = True, None  # what is final in it is to be learned
        self._announced = True
        self._seen.clear()

    @property
    def several(self) -> bool:
        """Whether gradients came more than once in this step, and nobody says when the last ones do."""
        return not self._by_word and len(self._seen) > len(set(self._seen))

    def note(self, param: Param) -> Ready | None:
        """A gradient has come. Returns the bucket that is to be stepped now, which is once in a step for each."""
        if self._by_word and not self._announced:
            return None
        self._seen.append(param)
        if self._times is None:
            self._samples[param] = _Sample(param, self._sample_of(param))
            return None
        bucket = self._bucket_of.get(param)
        if bucket is None:
            return None
        waiting = self._waiting[bucket]
        waiting[param] -= 1
        if any(left > 0 for left in waiting.values()):
            return None
        changing = self._expected.pop(bucket, set())
        if not changing:
            return None
        return Ready(bucket, changing, self.coming)

    @property
    def knows(self) -> bool:
        """Whether it is known from a step which gradients come."""
        return self._times is not None

    @property
    def active(self) -> bool:
        """Whether buckets are stepped in this backward."""
        return self.knows and (self._announced or not self._by_word)

    @property
    def coming(self) -> Collection[tuple[Bucket, Set[Param]]]:
        """What is expected to be stepped, in this order."""
        return self._expected.items()

    def stepped(self, params: Iterable[Param]) -> None:
        """Parameters have been stepped: until the end of the step none may be used."""
        if not self._streams:
            self.whole = False
            call_after_backward(self._backward_ends)
        stream = self._device.current_stream()
        self._streams[stream.stream_id] = stream, stream.record_event()
        for param in params:
            if self.keeps:
                self._kept.append((param, param.grad, None if param.grad is None else param.grad._version))
            else:
                if spread_of(param) and param.grad is not None:
                    self._held.append(param.grad)  # its memory may be another stream's
                param.grad = None
            if can_guard(param):
                put_guard(param, self)
                self._guarded.append(param)

    def asked(self, tensor: torch.Tensor, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """A parameter that has been stepped is about to be used. Raises OverlapRefused."""
        if function == SET_GRADIENT and args[1] is None:
            return
        if function == GET_GRADIENT:
            if self.keeps:
                return
            raise OverlapRefused(
                f"somebody wants a gradient of {self._name} between backward and step, and it was used and freed "
                f"in backward. Nothing may clip, scale or read gradients there: {_INSTEAD}; with "
                "keep_gradients=True they can be read"
            )
        raise OverlapRefused(
            f"a parameter of {self._name} is used after the backward in which it was stepped, and before step(). "
            "With several backwards in a step call optimizer.last_backward() before the last of them; for all else "
            f"{_INSTEAD}"
        )

    def shape_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def refusal(self) -> str | None:
        """What shows that gradients are not left alone between backward and step. None where nothing does."""
        samples = self._samples.values()
        changed = [sample for sample in samples if sample.changed(self._sample_of(sample.param))]
        if changed:
            what = f"{len(changed)} of {len(self._samples)} gradients were changed between backward and step"
            return f"{what}, as by clipping, a scaler, or DistributedDataParallel"
        return None

    def kept_changed(self) -> bool:
        """Whether a gradient that was to stay is another by now."""
        return any(
            param.grad is not gradient or (gradient is not None and gradient._version != version)
            for param, gradient, version in self._kept
        )

    def step_begins(self) -> None:
        """Parameters may be used again, and their work is done for the current stream."""
        for param in self._guarded:
            end_guard(param)
        self._guarded.clear()
        now = self._device.current_stream()
        for number, (_, event) in self._streams.items():
            if number != now.stream_id:
                now.wait_event(event)

    def step_ends(self, buckets: Sequence[Bucket]) -> None:
        """Learns from the step what the next one is to expect."""
        if self._seen and (not self._by_word or self._announced):
            times = Counter(self._seen)
            if max(times.values()) > 1 and not self._by_word:
                self._times = None
                self._tell()
            else:
                self._times = times
                self.order = list(dict.fromkeys(reversed(self._seen)))[::-1]  # by the last time of each
        self.forget()
        self.expect(buckets)

    def expect(self, buckets: Sequence[Bucket]) -> None:
        """The gradients that were there in the step before are waited for, in buckets that come in their order."""
        times = self._times or Counter()
        place = {param: number for number, param in enumerate(self.order)}
        expected = {bucket: {param for param in bucket.params if param in times} for bucket in buckets}
        in_order = sorted(
            (max(place[param] for param in params), number, bucket)
            for number, (bucket, params) in enumerate(expected.items())
            if params
        )
        self._expected = {bucket: expected[bucket] for _, _, bucket in in_order}
        self._waiting = {
            bucket: Counter({param: times[param] for param in params}) for bucket, params in self._expected.items()
        }
        self._bucket_of = {param: bucket for bucket, params in self._expected.items() for param in params}

    def forget(self) -> None:
        """The step that was prepared for does not come, or is over."""
        self._announced = False
        self._seen.clear()
        self._samples.clear()
        self._streams.clear()
        self._held.clear()
        self._kept.clear()
        self.whole = True

    def close(self) -> None:
        """There are no more steps."""
        self.step_begins()
        self.forget()

    @uninterrupted
    def _backward_ends(self) -> None:
        self.whole = True

    def _sample_of(self, param: Param) -> torch.Tensor | None:
        # What processes do to gradients together may not count as a change. All else does.
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        if alone or param.grad is None or param.grad.layout is not torch.strided:
            return None
        first = next(plain_tensors(param.grad), None)
        return None if first is None else first.detach().reshape(-1)[:_SAMPLE].clone()

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            _log.info(
                "%s had several backwards in a step, and is stepped after them: call optimizer.last_backward() "
                "before the last one",
                self._name,
            )


class _Sample:
    """What a gradient was when it was there. elements: some of it."""

    def __init__(self, param: Param, elements: torch.Tensor | None) -> None:
        self.param = param
        self._gradient = param.grad
        self._version = None if param.grad is None else param.grad._version
        self._elements = elements

    def changed(self, elements: torch.Tensor | None) -> bool:
        """Whether it is another by now. elements: the same ones, as they are now."""
        gradient = self.param.grad
        if gradient is None or gradient is not self._gradient or gradient._version != self._version:
            return True
        if self._elements is None or elements is None:
            return False
        return not torch.equal(self._elements.view(torch.uint8), elements.view(torch.uint8))


def _changed(name: str) -> str:
    return (
        f"{name!r} of a group was changed after the first buckets had been stepped in backward. A scheduler is to "
        "make its step before backward or after step()"
    )
