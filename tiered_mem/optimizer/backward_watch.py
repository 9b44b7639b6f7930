"""Tells when a backward is near its end."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable

from torch.utils.hooks import RemovableHandle

from ..ground.interrupts import uninterrupted
from .layout import Param

# The share of the parameters that may still be without a gradient.
_LAST = 0.1


class BackwardWatch:
    """Calls `near_end` when all but the last tenth of the parameters have got their last gradient before a step.

    Which is the last, of however many backwards, it has learned from the step before. Where that was different,
    `near_end` is called too early or not at all, and the next step is learned from.

    near_end: a method, of an object that is not kept alive.
    """

    def __init__(self, near_end: Callable[[], object]) -> None:
        self._near_end = weakref.WeakMethod(near_end)
        self._handles: list[RemovableHandle] = []
        self._order: list[Param] = []
        self._awaited: tuple[Param, int] | None = None
        self._count = 0
        self._called = False

    def step_ends(self, params: Iterable[Param]) -> None:
        """A step is over. params: those that the next one may have gradients for."""
        learned, self._order = self._order, []
        if not self._called:
            self._awaited = None
            if learned:
                times = Counter(learned)
                last = learned[-max(1, int(len(times) * _LAST))]
                self._awaited = last, times[last]
            self._watch(params if self._awaited is None else [self._awaited[0]])
        self._called = False
        self._count = 0

    def close(self) -> None:
        """Watches no more."""
        self._watch(())

    def _watch(self, params: Iterable[Param]) -> None:
        for handle in self._handles:
            handle.remove()
        me = weakref.ref(self)

        # What a weight's hook raises leaves nodes in a queue of autograd's, and what they have saved alive.
        @uninterrupted
        def gradient_is_there(param: Param) -> None:
            watch = me()
            if watch is not None:
                watch._note(param)

        self._handles = []
        for param in params:
            if not (param.is_leaf and param.requires_grad):
                continue  # it may have been frozen since
            handle = param.register_post_accumulate_grad_hook(gradient_is_there)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def _note(self, param: Param) -> None:
        if self._awaited is None:
            self._order.append(param)
            return
        self._count += 1  # there are hooks on this one parameter alone
        if self._count == self._awaited[1]:
            self._called = True
            if (near_end := self._near_end()) is not None:
                near_end()
