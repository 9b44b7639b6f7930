"""Wrappers whose forward begins with bookkeeping of their own do not begin it while their parameters are away."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch.utils.hooks import RemovableHandle

from .placeholder import WayBack, away


class Gates:
    """Hooks of modules, each of which raises Offloaded as long as something of its module is away.

    Without one FSDP2 and DistributedDataParallel would meet it in the middle of a forward: the one would stay
    there, and the other would build its buckets anew from parameters without elements.
    """

    def __init__(self) -> None:
        self._shut: weakref.WeakKeyDictionary[torch.nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()

    def shut(self, modules: Iterable[torch.nn.Module]) -> None:
        """From now on their forwards look whether all is there."""
        for module in modules:
            if module not in self._shut:
                self._shut[module] = module.register_forward_pre_hook(_refuse, prepend=True)

    def open(self) -> None:
        """Takes the hooks from modules of which nothing is away any more."""
        for module, handle in list(self._shut.items()):
            if next(_away(module), None) is None:
                handle.remove()
                del self._shut[module]


def _refuse(module: torch.nn.Module, _args: object) -> None:
    if (known := next(_away(module), None)) is not None:
        raise known.refusal()


def _away(module: torch.nn.Module) -> Iterator[WayBack]:
    return (known for parameter in module.parameters() if (known := away(parameter)) is not None)
