"""Where a policy has sent blocks, and which go on to disk."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .base import Action, Fetch, Offload, Release, Spill

Home = tuple[int, int, int]


@dataclass
class SentAway:
    """Follows a policy's answers: the blocks that leave the device, are on the host, or were sent on to disk.

    A block is spilled at most once each time it leaves the device, and never after its reload was advised.
    """

    _leaving: OrderedDict[int, Home] = field(default_factory=OrderedDict)
    _released: dict[int, Home] = field(default_factory=dict)
    _on_host: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    _on_disk: set[int] = field(default_factory=set)

    def follow(self, actions: Sequence[Action], homes: Mapping[int, Home]) -> Sequence[Action]:
        """Takes note of an answer, and returns it.

        homes: the graph and the layer that each block belongs to, and its size in bytes.
        """
        back: list[int] = []
        for action in actions:
            key = action.key
            kind = type(action)
            if kind is Offload:
                self._leaving[key] = homes[key]
            elif kind is Release:
                home = self._leaving.pop(key, None)
                if home is not None:
                    graph, layer, nbytes = self._released[key] = home
                    self._on_host.setdefault((graph, layer), {})[key] = nbytes
            elif kind is Spill:
                self.forget((key,))
                self._on_disk.add(key)
            else:
                back.append(key)
        self.forget(back)
        return actions

    def forget(self, keys: Iterable[int]) -> None:
        """The blocks are on the device, on their way there, or gone."""
        for key in keys:
            self._leaving.pop(key, None)
            self._on_disk.discard(key)
            home = self._released.pop(key, None)
            if home is not None:
                blocks = self._on_host[home[:2]]
                del blocks[key]
                if not blocks:
                    del self._on_host[home[:2]]

    def spill(self, nbytes: int, needed_last: Callable[[tuple[int, int]], Any]) -> list[Action]:
        """Sends `nbytes` on to disk. Where the host has too few blocks, leaving ones are released and go too.

        needed_last: the sort key of a graph and a layer; the blocks of the smallest go first.
        """
        releases: list[Action] = []
        spills: list[Action] = []
        places = sorted(self._on_host, key=needed_last)
        on_host = itertools.chain.from_iterable(self._on_host[place].items() for place in places)
        leaving = ((key, nbytes) for key, (_, _, nbytes) in self._leaving.items())
        for key, size in itertools.chain(on_host, leaving):
            if nbytes <= 0:
                break
            if key in self._leaving:
                releases.append(Release(key))
            spills.append(Spill(key))
            nbytes -= size
        return releases + spills

    def fetch(self, keys: Iterable[int]) -> list[Fetch]:
        """Fetches the blocks that were sent to disk."""
        return [Fetch(key) for key in keys if key in self._on_disk]
