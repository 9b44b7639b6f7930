"""The states of one optimizer, for one thread at a time."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from ..errors import Closed, InterruptedStep
from ..interrupts import interruptible, uninterrupted
from .backward_watch import BackwardWatch
from .bucket import fetch_ahead
from .buckets import Buckets
from .layout import Param, State, on_cpu
from .partial_step import bare_step

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

    buckets: of this optimizer, not used otherwise.

    at_once: whether it is stepped at once. closure_first: whether a step calls a closure once, before all else.
    version: another one whenever states have changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, buckets: Buckets) -> None:
        self._lock = threading.RLock()
        self._optimizer = optimizer
        self.buckets = buckets
        self.at_once = buckets.choice.at_once
        self.closure_first = buckets.choice.closure_first
        self.version = 0
        self._closed = False
        self._watch = BackwardWatch(self._prefetch)

    @_alone
    def adopt(self) -> None:
        """Takes over the parameters of the optimizer's groups that are new, and their states if they have any.

        Raises TierFull, torch.OutOfMemoryError, and whatever the disk does; the optimizer has its states then as
        before, and all that was taken is given back.
        """
        self._not_inside("have new parameters")
        self.version += 1
        self.buckets.adopt()
        if self.buckets.away:
            self._learn()

    @_alone
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of the optimizer, and what that returns where it is made at once.

        closure: is the optimizer's to call, which makes the step at once.

        Raises InterruptedStep if it ends in the middle, and at every call after that. A step at once raises what
        the optimizer alone does, and leaves the same behind.
        """
        self.check()
        buckets = self.buckets
        if not buckets.here:
            self._adopt_unknown()
        in_place = buckets.here or not buckets.away
        if in_place or closure is not None or buckets.choice.at_once_now(buckets.all):
            with self.present():
                return bare_step(self._optimizer)(*([] if closure is None else [_interruptible(closure)]))
        self.version += 1
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
            if self.buckets.here:
                yield
                return
            self._adopt_unknown()
            self.buckets.bring()
            self.version += 1
            try:
                yield
            finally:
                self.version += 1
                if not self._closed:
                    self.buckets.take_over()
            if self.buckets.away:
                self.poll()
                self._learn()

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
    def snapshot(self) -> dict[Any, Any]:
        """Copies of all states by parameter, and of what else the optimizer keeps, in pageable memory."""
        self.check()
        self.buckets.drop_prefetch()
        whole: dict[Any, Any] = {key: on_cpu(value) for key, value in self._optimizer.state.items()}
        for bucket in self.buckets.all:
            whole |= bucket.copies()
        return whole

    def keys(self) -> list[Any]:
        """What has a state: parameters, for the most part."""
        return [*self._optimizer.state, *(param for bucket in self.buckets.all for param in bucket.states)]

    @_alone
    def copies_with(self, key: Any) -> dict[Any, State]:
        """The states of the bucket that a parameter is in, as in `snapshot`; its own is empty if it has none."""
        self.check()
        self.buckets.drop_prefetch()
        for bucket in self.buckets.all:
            if key in bucket.states:
                return bucket.copies()
        return {key: on_cpu(self._optimizer.state.get(key, {}))}

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
        before = self._optimizer.state
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
        buckets.choice.look_at_groups()
        buckets.broken = None

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
        self._adopt_unknown()
        self.buckets.bring()
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

    def _adopt_unknown(self) -> None:
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
