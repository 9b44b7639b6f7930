"""A context in which modules and states of optimizers are away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Generic, TypeVar

import torch

from ..ground.interrupts import uninterrupted

Thing = TypeVar("Thing")


class Absence(Generic[Thing]):
    """Offloads each thing when it is entered, and reloads all when it is left, whatever ended it.

    It may be entered again afterwards.

    offload, reload: of one thing; each does all of it or nothing.
    """

    def __init__(
        self, offload: Callable[[Thing], None], reload: Callable[[Thing], None], things: Sequence[Thing]
    ) -> None:
        self._offload = offload
        self._reload = reload
        self._things = things

    @uninterrupted
    def __enter__(self) -> None:
        """Raises what the first thing raises that cannot leave. Then those before it are back."""
        self._each(self._offload, undo=self._reload)

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises torch.OutOfMemoryError where the device has no room for all of them. Then all stay away."""
        try:
            self._each(self._reload, undo=self._offload)
        except torch.OutOfMemoryError as full:
            raise torch.OutOfMemoryError(
                "the device has no room for what was away in this context, and all of it stays away: free some, "
                f"and call manager.reload() of each. {full}"
            ) from full

    def _each(self, do: Callable[[Thing], None], undo: Callable[[Thing], None]) -> None:
        with ExitStack() as undone:
            for thing in self._things:
                do(thing)
                undone.callback(undo, thing)
            undone.pop_all()
