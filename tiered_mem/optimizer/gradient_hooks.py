"""Hooks that tell of gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from torch.utils.hooks import RemovableHandle

from ..device.torch_private import HOOKS_OF_GRADIENTS
from ..ground.interrupts import uninterrupted
from .layout import Param


class Hearing(Protocol):
    """Whoever hears of gradients. See `States`."""

    def gradient_is_there(self, param: Param) -> None: ...
    def near_end(self) -> None: ...


class GradientHooks:
    """Has parameters tell of each gradient when it has been added."""

    def __init__(self) -> None:
        self._handles: dict[Param, RemovableHandle] = {}

    def watch(self, params: Iterable[Param], hearing: Hearing) -> None:
        """Watches these, as far as they get gradients, and no others. hearing: is not kept alive."""
        wanted = {param for param in params if param.is_leaf and param.requires_grad}
        for param in self._handles.keys() - wanted:
            self._handles.pop(param).remove()
        ear = weakref.ref(hearing)

        # What a weight's hook raises leaves nodes in a queue of autograd's, and what they have saved alive.
        @uninterrupted
        def gradient_is_there(param: Param) -> None:
            if (hearing := ear()) is not None:
                hearing.gradient_is_there(param)

        for param in wanted - self._handles.keys():
            handle = param.register_post_accumulate_grad_hook(gradient_is_there)  # type: ignore[no-untyped-call]
            self._handles[param] = handle

    def others(self) -> int:
        """How many of the parameters have such a hook of somebody else, too."""
        return sum(
            not all(map(_is_ours, (getattr(param, HOOKS_OF_GRADIENTS) or {}).values())) for param in self._handles
        )

    def close(self) -> None:
        """Watches no more."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def _is_ours(hook: Callable[..., object]) -> bool:
    """Whether it is of this library, as an attached model has one too. None of its hooks uses a gradient."""
    return getattr(hook, "__module__", "").startswith(f"{__name__.partition('.')[0]}.")
