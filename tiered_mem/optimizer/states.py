"""The states of one optimizer, for one thread at a time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from ..errors import Closed, InterruptedStep, Reentered
from ..ground.interrupts import uninterrupted
from ..ground.wrappers import copied
from .bucket import Bucket, fetch_ahead
from .layout import Param, State, StateLayout, contents, on_cpu, params_of, with_tensors
from .partial_step import bare_step, interruptible_closure
from .pipeline import Pipeline
from .resting import StatePlace
from .separable import StepChoice
from .stepping import Stepping

P = ParamSpec("P")
R = TypeVar("R")


def _alone(method: Callable[Concatenate[States, P], R]) -> Callable[Concatenate[States, P], R]:
    """One thread at a time: those of backward come here, too."""

    @uninterrupted
    @functools.wraps(method)
    def alone(self: States, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return alone


class States:
    """The states of one optimizer, in buckets. None are here before `adopt`.

    choice, pipeline, stepping: of this optimizer, not used otherwise. stay: the states stay on the device until
    `offload`, and are there again after `reload`. around: gives what a step without a closure is made in.

    at_once: whether it is stepped at once. closure_first: whether a step calls a closure once, before all else.
    away: states leave the device after a step. forgotten: nobody has the optimizer any more.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        choice: StepChoice,
        pipeline: Pipeline,
        stepping: Stepping,
        *,
        stay: bool,
        around: Callable[[States], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._optimizer = optimizer
        self._name = type(optimizer).__name__
        self._choice = choice
        self._stay = stay
        self._around = around
        self._lock = stepping.lock
        self._known: set[Param] = set()  # the parameters in the buckets
        self.stepping = stepping
        self._closed = False
        self._lent = False
        self._place = stepping.place = StatePlace(optimizer, self)
        self.pipeline = pipeline
        self.at_once = choice.at_once
        self.closure_first = choice.closure_first
        self.away = not stay
        self.forgotten = False

    @property
    def here(self) -> bool:
        """Whether states are where the optimizer looks for them."""
        return self._place.filled

    @property
    def version(self) -> int:
        """Another one whenever states have changed."""
        return self._place.version

    @_alone
    def adopt(self) -> None:
        """Takes over the parameters of the optimizer's groups that are new, and their states if they have any.

        Raises TierFull, torch.OutOfMemoryError, and whatever the disk does; the optimizer has its states then as
        before, and all that was taken is given back.
        """
        self._not_inside("have new parameters")
        with self._place.used():
            self._take_new()
            self._place.taken = True
        if self.away:
            self._learn()

    def _take_new(self) -> None:
        self._choice.split.look()
        self._choice.look_at_groups()
        layouts: dict[Param, StateLayout] = {}
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param not in self._known and param not in layouts:
                    layouts[param] = self._choice.trial.layout_of(param, group)
        state = self._optimizer.state
        before = dict(state)
        buckets = self.pipeline.packed(reversed(layouts.items()) if self.stepping.last_first else layouts.items())
        try:
            self.pipeline.residences.house(buckets)
            for bucket in buckets:
                self._place.empty_into(bucket)
                # Other dictionaries with the same tensors: those from before are there to go back to.
                bucket.states = with_tensors(bucket.states, lambda tensor: tensor)
            self.pipeline.drop()
            if self.away:
                self.pipeline.offload(buckets)
                self.pipeline.residences.poll()
        except BaseException:
            for bucket in buckets:
                bucket.close()
            state.clear()
            state.update(before)
            raise
        self._known.update(layouts)
        self.pipeline.buckets += buckets

    @_alone
    def step(self, closure: Callable[[], float] | None = None, options: dict[str, Any] | None = None) -> Any:
        """One step of the optimizer, and what that returns where it is made at once.

        closure: is the optimizer's to call, which makes the step at once. options: what else its step takes, which
        does, too.

        Raises InterruptedStep if it ends in the middle, and at every call after that. A step at once raises what
        the optimizer alone does, and leaves the same behind.
        """
        self.check()
        # A closure has forwards and a backward of its own, which others look at.
        with contextlib.nullcontext() if closure is not None else self._around(self):
            return self._step(closure, options or {})

    def _step(self, closure: Callable[[], float] | None, options: dict[str, Any]) -> Any:
        if not self.here:
            self._adopt_unknown()
        in_place = self.here or not self.away or closure is not None or bool(options)
        if not self.begun and (in_place or self._choice.at_once_now(self.pipeline.buckets)):
            with self.present():
                arguments = [] if closure is None else [interruptible_closure(closure)]
                return bare_step(self._optimizer)(*arguments, **options)
        self.stepping.step()
        self.poll()
        self._learn()
        return None

    def gradient_is_there(self, param: Param) -> None:
        """A gradient has come. In a thread of backward's; while another has the states, it is for step() to see."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            in_buckets = not (self.at_once or self.here or self._place.has_other)
            if self._usable and in_buckets and self.away and not self.forgotten:
                self.stepping.gradient(param)
        finally:
            self._lock.release()

    @property
    def begun(self) -> bool:
        """Whether a part of the step that is asked for has been made already."""
        return self.stepping.open is not None

    @_alone
    def asked_to_step(self, owner: object, *, at_once: bool) -> None:
        """Before all else that a step does. Raises what `Stepping.asked` does."""
        self.check()
        self.stepping = self.stepping.asked(owner, at_once=at_once)

    @_alone
    def finish(self) -> None:
        """What of a step is still to come is made now. After one that was interrupted nothing is."""
        if self._usable:
            self.stepping.finish()

    @contextlib.contextmanager
    @uninterrupted
    def present(self) -> Iterator[None]:
        """Inside, all states are on the device, in the optimizer's `state`, and may be changed there.

        Raises torch.OutOfMemoryError, and what the residences raise, before anything is changed.
        """
        with self._lock:
            self.check()
            self.stepping.whole("present()")
            with self._leaving():
                self._bring()
                yield

    @contextlib.contextmanager
    @uninterrupted
    def lent(self) -> Iterator[None]:
        """Inside, a look into the optimizer's `state` has `present` begin, which ends here.

        Raises what `check` does.
        """
        with self._lock:
            self.check()
            self.stepping.whole("a call of its own")
            before, self._lent = self._lent, True
            try:
                with self._leaving():
                    yield
            finally:
                self._lent = before

    @_alone
    def lent_out(self) -> dict[Any, Any] | None:
        """The optimizer's own `state`, where it may be changed now: inside of `present` and `lent`."""
        if self._lent:
            self._bring()
        return self._place.own if self.here else None

    def poll(self) -> None:
        """Goes on with files: writes what can be written by now, and reads what the next step begins with.

        Does not wait.
        """
        if not self._lock.acquire(blocking=False):
            return  # whoever has it goes on as well
        try:
            self.pipeline.residences.poll()
            if self._usable:
                fetch_ahead(list(self.stepping.coming))
        finally:
            self._lock.release()

    def keep(self, nbytes: int) -> bool:
        """The first buckets of so many bytes stay on the device. False where that cannot be changed now.

        Does not wait for other threads, but for the copies of what leaves. Raises what the residences raise.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            can = self._usable and not self.at_once and not self.here and not self.begun
            if can:
                self.pipeline.keep(nbytes)
            return can
        finally:
            self._lock.release()

    @_alone
    def wait(self) -> None:
        """Waits until every file is written, also those of a step that is still to be made."""
        self.finish()
        self.pipeline.residences.wait()

    @_alone
    def drop_prefetch(self) -> None:
        """There is no step to come after all. Raises OverlapRefused where a part of it is done."""
        self.stepping.no_step()

    @_alone
    def offload(self) -> None:
        """Everything leaves the device, and has left it when this returns. Does nothing where that is so anyway.

        Raises what `step` does; TierFull leaves what is on the device there.
        """
        self.check()
        self._not_inside("be offloaded")
        self.pipeline.drop()
        self.away = True
        self.pipeline.offload(self.pipeline.buckets)

    @_alone
    def reload(self) -> None:
        """Everything is on the device again, if it stays there. All or nothing: raises torch.OutOfMemoryError."""
        self.check()
        self._not_inside("be reloaded")
        if self._stay:
            self.pipeline.reload(self.pipeline.buckets)
            self.away = False

    @_alone
    def snapshot(self) -> dict[str, Any]:
        """What the optimizer's own `state_dict` makes of copies, all in pageable memory."""
        self.check()
        self.stepping.whole("a look at its states")
        self._adopt_loaded()
        self.pipeline.drop()
        whole: dict[Any, Any] = {key: on_cpu(value) for key, value in self._place.own.items()}
        for bucket in self.pipeline.buckets:
            whole |= bucket.copies()
        # Whatever else it may keep, such as a learning rate that is a tensor.
        packed: dict[str, Any] = on_cpu(self._place.packed(whole), set(map(id, contents(whole))))
        return packed

    @_alone
    def save(self, write: Callable[[dict[str, Any], dict[Any, Any], Sequence[Bucket]], None]) -> None:
        """Calls `write` with a state_dict of keys, with the states in no bucket, and with the buckets.

        Nothing else can be done meanwhile, not even by a signal's handler. Raises what `write` does.
        """
        self.check()
        self._not_inside("be saved")
        self._adopt_loaded()
        self.pipeline.drop()
        packed = self._place.packed({key: key for key in self.keys()})
        saving = f"the states of {self._name} are being saved in this thread"
        self.stepping.broken = functools.partial(Reentered, saving)
        try:
            write(packed, self._place.own, self.pipeline.buckets)
        finally:
            self.stepping.broken = None

    @_alone
    def keys(self) -> list[Any]:
        """What has a state, parameters for the most part, in the order in which the optimizer has them."""
        self.check()
        self.stepping.whole("a look at its states")
        moving = (key for bucket in self.pipeline.buckets for key in bucket.states)
        return self._place.in_order([*self._place.own, *moving])

    @_alone
    def copy_of(self, key: Any) -> Any:
        """A copy of a parameter's state where it is in a step, or of what else the optimizer keeps."""
        self.check()
        self.stepping.whole("a look at its states")
        self.pipeline.drop()
        if (bucket := self.pipeline.bucket_of(key)) is not None:
            return bucket.copy_of(key, self.pipeline.device.torch_device)
        return with_tensors(self._place.own.get(key, {}), copied)

    @_alone
    def copies_with(self, key: Any) -> dict[Any, State]:
        """Copies of the states of the bucket that a parameter is in, in pageable memory; its own may be empty."""
        self.check()
        self.stepping.whole("a look at its states")
        self._adopt_loaded()
        self.pipeline.drop()
        bucket = self.pipeline.bucket_of(key)
        return {key: on_cpu(self._place.own.get(key, {}))} if bucket is None else bucket.copies()

    @_alone
    def load(self, load: Callable[[Sequence[Param]], None], at_once: bool) -> None:
        """Replaces all states. Afterwards a step that was interrupted is of no matter any more.

        load: has the optimizer load the states of some parameters, which it puts on the device, and whatever
        belongs to no parameter. at_once: it is called once for all parameters, and otherwise for each bucket, after
        a call for none.

        Raises what `load` does. If that has changed nothing, all states are as before; otherwise check() says so.
        """
        if self._closed:
            self.check()
        self._not_inside("be loaded")
        self.pipeline.drop()
        self._adopt_unknown()
        with self._place.used():
            self._load(load, at_once)
        self._choice.look_at_groups()
        self.stepping.broken = None
        self.stepping.begin_anew()

    def _load(self, load: Callable[[Sequence[Param]], None], at_once: bool) -> None:
        buckets, before = self.pipeline.buckets, self._optimizer.state
        loaded = 0
        try:
            load([param for bucket in buckets for param in bucket.params] if at_once else [])
            others = {key: value for key, value in self._optimizer.state.items() if key not in self._known}
            if self.at_once:
                self.pipeline.forget()
                self._take_all()
            else:
                for bucket in buckets:
                    if not at_once:
                        load(bucket.params)
                    self._take_loaded(bucket)
                    loaded += 1
        except BaseException:
            if self._optimizer.state is not before:
                interrupted = functools.partial(InterruptedStep, self._name, loaded, len(buckets), loading=True)
                self.stepping.broken = interrupted
            raise
        self._optimizer.state.clear()
        self._optimizer.state.update(others)

    def check(self) -> None:
        """Raises Closed or InterruptedStep where the states cannot be used."""
        if self._closed:
            raise Closed(
                "the manager is closed, and with it the states of the optimizer are gone: take state_dict() before"
            )
        if self.stepping.broken is not None:
            raise self.stepping.broken()

    @_alone
    def give_back(self) -> None:
        """All states are on the device, in the optimizer's `state`, for good.

        Raises what `present` does, before anything is changed.
        """
        self.check()
        self._not_inside("be given back")
        self._bring()
        self.close()

    @_alone
    def close(self) -> None:
        """Frees all memory. The states are gone."""
        self._closed = True
        self._place.version += 1
        self.stepping.close()
        self.pipeline.close()

    @property
    def _usable(self) -> bool:
        return self.stepping.broken is None and not self._closed

    def _bring(self) -> None:
        """Brings all states to the device and into the optimizer's `state`. If that fails, nothing has changed."""
        if self.here:
            return
        self._adopt_unknown()
        with self._place.used():
            self.pipeline.drop()
            self.pipeline.reload(self.pipeline.buckets)
            self._place.fill(self.pipeline.buckets)
            self.pipeline.residences.step_begins()

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        """States that are brought inside leave the device afterwards."""
        if self.here:
            yield
            return
        try:
            yield
        finally:
            if (brought := self.here) and not self._closed:
                with self._place.used():
                    self._take_all()
        if brought and self.away:
            self.poll()
            self._learn()

    def _take_all(self) -> None:
        """Takes all states from the optimizer; the buckets may be others now.

        What there is no room for stays on the device.
        """
        self._place.leave()
        self._choice.split.look()
        for bucket in self.pipeline.buckets:
            self._place.empty_into(bucket)
        self.pipeline.renew()
        if self.away:
            self.pipeline.offload_stepped()

    def _take_loaded(self, bucket: Bucket) -> None:
        """Takes what has been loaded for one bucket, in place of what was in it; the optimizer has no other."""
        bucket.drop_flat()
        self._place.empty_into(bucket)
        self.pipeline.refit(bucket)
        if self.away:
            self.pipeline.offload([bucket])

    def _adopt_loaded(self) -> None:
        """Takes over what somebody has loaded into the optimizer itself."""
        if self._place.has_other and not self.here:
            with self._place.used():
                self.pipeline.forget()
                self._take_all()
            self._choice.look_at_groups()

    def _adopt_unknown(self) -> None:
        self._adopt_loaded()
        if any(param not in self._known for param in params_of(self._optimizer)):
            self.adopt()

    def _not_inside(self, what: str) -> None:
        self.stepping.whole(f"a call that would have its states {what}")
        if self.here:
            raise RuntimeError(f"the states cannot {what} in the middle of a step, or inside of present()")

    def _learn(self) -> None:
        if not self.at_once:
            self.stepping.learn(self._known, self)

    def near_end(self) -> None:
        """Brings the first bucket of the next step to the device while backward ends, if the memory is there."""
        if not self._lock.acquire(blocking=False):
            return  # a step is under way, whose closure this backward is of
        try:
            if self._usable and not self.at_once:
                self.pipeline.prefetch_first()
        finally:
            self._lock.release()
