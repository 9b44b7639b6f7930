"""The states of one optimizer, for one thread at a time."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from ..errors import Closed, InterruptedStep
from ..ground.interrupts import interruptible, uninterrupted
from ..ground.wrappers import copied
from .backward_watch import BackwardWatch
from .bucket import fetch_ahead
from .buckets import Buckets
from .layout import Param, State, contents, on_cpu, with_tensors
from .partial_step import bare_step
from .resting import StatePlace

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

    buckets: of this optimizer, not used otherwise. around: gives what a step without a closure is made in.

    at_once: whether it is stepped at once. closure_first: whether a step calls a closure once, before all else.
    version: another one whenever states have changed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Buckets,
        around: Callable[[Buckets], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._around = around
        self._lock = threading.RLock()
        self._optimizer = optimizer
        self.buckets = buckets
        self.at_once = buckets.choice.at_once
        self.closure_first = buckets.choice.closure_first
        self.version = 0
        self._closed = False
        self._lent = False
        self._place = StatePlace(optimizer, self)
        self._watch = BackwardWatch(self._prefetch)

    @_alone
    def adopt(self) -> None:
        """Takes over the parameters of the optimizer's groups that are new, and their states if they have any.

        Raises TierFull, torch.OutOfMemoryError, and whatever the disk does; the optimizer has its states then as
        before, and all that was taken is given back.
        """
        self._not_inside("have new parameters")
        self.version += 1
        with self._in_place():
            self.buckets.adopt()
            self._place.taken = True
        if self.buckets.away:
            self._learn()

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
        with contextlib.nullcontext() if closure is not None else self._around(self.buckets):
            return self._step(closure, options or {})

    def _step(self, closure: Callable[[], float] | None, options: dict[str, Any]) -> Any:
        buckets = self.buckets
        if not buckets.here:
            self._adopt_unknown()
        in_place = buckets.here or not buckets.away
        if in_place or closure is not None or options or buckets.choice.at_once_now(buckets.all):
            with self.present():
                arguments = [] if closure is None else [_interruptible(closure)]
                return bare_step(self._optimizer)(*arguments, **options)
        self.version += 1
        with self._in_place():
            buckets.step()
        self.poll()
        self._learn()
        return None

    @contextlib.contextmanager
    @uninterrupted
    def present(self) -> Iterator[None]:
        """Inside, all states are on the device, in the optimizer's `state`, and may be changed there.

        Raises torch.OutOfMemoryError, and what the residences raise, before anything is changed.
        """
        with self._lock:
            self.check()
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
        return self._place.own if self.buckets.here else None

    def poll(self) -> None:
        """Goes on with files: writes what can be written by now, and reads what the next step begins with.

        Does not wait.
        """
        if not self._lock.acquire(blocking=False):
            return  # whoever has it goes on as well
        try:
            self.buckets.residences.poll()
            if self._usable:
                fetch_ahead(self.buckets.all)
        finally:
            self._lock.release()

    def keep(self, nbytes: int) -> bool:
        """The first buckets of so many bytes stay on the device. False where that cannot be changed now.

        Does not wait for other threads, but for the copies of what leaves. Raises what the residences raise.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._usable and not self.at_once and not self.buckets.here:
                self.buckets.keep(nbytes)
                return True
            return False
        finally:
            self._lock.release()

    @_alone
    def wait(self) -> None:
        """Waits until every file is written."""
        self.buckets.residences.wait()

    @_alone
    def drop_prefetch(self) -> None:
        """There is no step to come after all."""
        self.buckets.drop_prefetch()

    @_alone
    def offload(self) -> None:
        """Everything leaves the device, and has left it when this returns. Does nothing where that is so anyway.

        Raises what `step` does; TierFull leaves what is on the device there.
        """
        self.check()
        self._not_inside("be offloaded")
        self.buckets.offload()

    @_alone
    def reload(self) -> None:
        """Everything is on the device again, if it stays there. All or nothing: raises torch.OutOfMemoryError."""
        self.check()
        self._not_inside("be reloaded")
        self.buckets.reload()

    @_alone
    def snapshot(self) -> dict[str, Any]:
        """What the optimizer's own `state_dict` makes of copies, all in pageable memory."""
        self.check()
        self._adopt_loaded()
        self.buckets.drop_prefetch()
        optimizer, rest = self._optimizer, self._optimizer.state
        whole: dict[Any, Any] = {key: on_cpu(value) for key, value in self._place.own.items()}
        for bucket in self.buckets.all:
            whole |= bucket.copies()
        try:
            optimizer.state = defaultdict(dict, whole)
            # Whatever else it may keep, such as a learning rate that is a tensor.
            packed: dict[str, Any] = on_cpu(optimizer.state_dict(), set(map(id, contents(whole))))
        finally:
            optimizer.state = rest
        return packed

    def keys(self) -> list[Any]:
        """What has a state, parameters for the most part, in the order in which the optimizer has them."""
        self.check()
        return self.buckets.in_order([*self._place.own, *(key for each in self.buckets.all for key in each.states)])

    @_alone
    def copy_of(self, key: Any) -> Any:
        """A copy of a parameter's state where it is in a step, or of what else the optimizer keeps."""
        self.check()
        self.buckets.drop_prefetch()
        for bucket in self.buckets.all:
            if key in bucket.states:
                return bucket.copy_of(key, self.buckets.device)
        return with_tensors(self._place.own.get(key, {}), copied)

    @_alone
    def copies_with(self, key: Any) -> dict[Any, State]:
        """Copies of the states of the bucket that a parameter is in, in pageable memory; its own may be empty."""
        self.check()
        self._adopt_loaded()
        self.buckets.drop_prefetch()
        for bucket in self.buckets.all:
            if key in bucket.states:
                return bucket.copies()
        return {key: on_cpu(self._place.own.get(key, {}))}

    @_alone
    def load(self, load: Callable[[Sequence[Param]], None], at_once: bool) -> None:
        """Replaces all states. Afterwards a step that was interrupted is of no matter any more.

        load: has the optimizer load the states of some parameters, which it puts on the device, and whatever
        belongs to no parameter. at_once: it is called once for all parameters, and otherwise for each bucket, after
        a call for none.

        Raises what `load` does. If that has changed nothing, all states are as before; otherwise check() says so.
        """
        buckets = self.buckets
        if self._closed:
            self.check()
        self._not_inside("be loaded")
        buckets.drop_prefetch()
        self._adopt_unknown()
        with self._in_place():
            self._load(load, at_once)
        buckets.choice.look_at_groups()
        buckets.broken = None

    def _load(self, load: Callable[[Sequence[Param]], None], at_once: bool) -> None:
        buckets, before = self.buckets, self._optimizer.state
        loaded = 0
        try:
            load([param for bucket in buckets.all for param in bucket.params] if at_once or self.at_once else [])
            others = {key: value for key, value in self._optimizer.state.items() if key not in buckets.known}
            if self.at_once:
                self.version += 1
                buckets.renew_all()
            else:
                for bucket in buckets.all:
                    if not at_once:
                        load(bucket.params)
                    self.version += 1
                    buckets.renew(bucket)
                    loaded += 1
        except BaseException:
            if self._optimizer.state is not before:
                name, count = type(self._optimizer).__name__, len(buckets.all)
                buckets.broken = functools.partial(InterruptedStep, name, loaded, count, loading=True)
            raise
        self._optimizer.state.clear()
        self._optimizer.state.update(others)

    def check(self) -> None:
        """Raises Closed or InterruptedStep where the states cannot be used."""
        if self._closed:
            raise Closed(
                "the manager is closed, and with it the states of the optimizer are gone: take state_dict() before"
            )
        if self.buckets.broken is not None:
            raise self.buckets.broken()

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
        self.version += 1
        self._watch.close()
        self.buckets.close()
        self.buckets.residences.close()

    @property
    def _usable(self) -> bool:
        return self.buckets.broken is None and not self._closed

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """Inside, the optimizer has its own dictionary for a `state`; and afterwards, if the states are here."""
        self._place.give_back()
        try:
            yield
        finally:
            if not self.buckets.here:
                self._place.take()

    def _bring(self) -> None:
        if not self.buckets.here:
            self._adopt_unknown()
            with self._in_place():
                self.buckets.bring()
            self.version += 1

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        """States that are brought inside leave the device afterwards."""
        if self.buckets.here:
            yield
            return
        try:
            yield
        finally:
            if brought := self.buckets.here:
                self.version += 1
                if not self._closed:
                    with self._in_place():
                        self.buckets.take_over()
        if brought and self.buckets.away:
            self.poll()
            self._learn()

    def _adopt_loaded(self) -> None:
        """Takes over what somebody has loaded into the optimizer itself."""
        if self._place.has_other and not self.buckets.here:
            self.version += 1
            with self._in_place():
                self.buckets.drop_prefetch()
                self.buckets.renew_all()
            self.buckets.choice.look_at_groups()

    def _adopt_unknown(self) -> None:
        self._adopt_loaded()
        known = self.buckets.known
        if any(param not in known for group in self._optimizer.param_groups for param in group["params"]):
            self.adopt()

    def _not_inside(self, what: str) -> None:
        if self.buckets.here:
            raise RuntimeError(f"the states cannot {what} in the middle of a step, or inside of present()")

    def _learn(self) -> None:
        if not self.at_once:
            self._watch.step_ends(self.buckets.known)

    def _prefetch(self) -> None:
        """Brings the first bucket of the next step to the device while backward ends, if the memory is there."""
        if not self._lock.acquire(blocking=False):
            return  # a step is under way, whose closure this backward is of
        try:
            if self._usable and not self.at_once:
                self.buckets.prefetch()
        finally:
            self._lock.release()


def _interruptible(closure: Callable[[], float]) -> Callable[[], float]:
    """The closure, which may run forwards and backwards for as long as these take."""

    @interruptible
    def call() -> float:
        return closure()

    return call
