"""What a policy may answer.

An action names a block by its key, an integer. It is advice: `after` says where it brings a block, if anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Literal, overload

from .places import Place


@dataclass(frozen=True, slots=True)
class Offload:
    """Begin to copy the block to the host. It stays on the device until it is released.

    Args:
        key: Of the block.
    """

    key: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give up the block's device memory: work issued from now on waits, on the device, for its copy to end.

    Args:
        key: Of the block.
    """

    key: int


@dataclass(frozen=True, slots=True)
class Reload:
    """Begin to copy the block back to the device; one that is on disk is read first.

    Args:
        key: Of the block.
    """

    key: int


@dataclass(frozen=True, slots=True)
class Spill:
    """Begin to write a block that is on the host to disk. Its host memory is free when the file is complete.

    Does nothing for a block that is elsewhere.

    Args:
        key: Of the block.
    """

    key: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Begin to read a block that is on disk into host memory, so that a later Reload finds it there.

    Where the host has no room for it, it is read as soon as there is some.
    Does nothing for a block that is elsewhere.

    Args:
        key: Of the block.
    """

    key: int


@dataclass(frozen=True, slots=True)
class Retain:
    """Keep the block's copy on the host when it is reloaded next, so that it can leave again without another one.

    The copy is given up where the host has no room for what leaves, and when nobody needs the block any more.
    Does nothing for a block that is not on the host, nor on its way there.

    Args:
        key: Of the block.
    """

    key: int


How = Literal["cheap", "full"]


@dataclass(frozen=True, slots=True)
class Recompute:
    """Keep less of a layer that is about to begin, and compute the rest again when backward comes to it.

    Counts in an answer to the LayerBegin of this layer's forward, and is passed over in any other. A layer that
    cannot be computed again without other numbers keeps all that it saves: the manager looks for that.

    Args:
        layer: The layer's position in its forward.
        how: "full" keeps the layer's inputs. "cheap" also keeps the results of what takes long to compute:
            products, attention and convolutions. What is kept are blocks, which may move as any other.
    """

    layer: int
    how: How


@dataclass(frozen=True, slots=True)
class Keep:
    """Leave all that a layer saves which is about to begin to autograd: it stays, and none of it is a block.

    That takes little host time: nothing more is told of the layer, neither its blocks, nor its end, nor its
    backward. Counts in an answer to the LayerBegin of this layer's forward, and is passed over in any other. The
    manager passes it over, too, where something else has to know of blocks: a disk tier, a trace, a wish to compute
    the layer again, or hooks of the user's own around it; and in a `layer_context`.

    Args:
        layer: The layer's position in its forward.
        layers: So many, this one and those after it, whose beginning is not told either.
    """

    layer: int
    layers: int = 1


Action = Offload | Release | Reload | Retain | Spill | Fetch
OfLayer = Recompute | Keep
Advice = Action | OfLayer


def after(action: type[Action], place: Place, sinking: bool) -> tuple[Place, bool] | None:
    """Where an action brings a block: its place, and whether it goes on to disk. None where it does nothing."""
    if action is Offload and place is Place.DEVICE:
        return Place.LEAVING, False
    if action is Release and place is Place.LEAVING:
        return Place.HOST, sinking
    if action is Reload and place is Place.LEAVING:
        return Place.DEVICE, False
    if action is Reload and place in (Place.HOST, Place.DISK):
        return Place.ARRIVING, False
    if action is Retain and place in (Place.LEAVING, Place.HOST):
        return place, sinking
    if action is Spill and place in (Place.LEAVING, Place.HOST) and not sinking:
        return place, True
    if action is Fetch and (place is Place.DISK or (place is Place.HOST and sinking)):
        return Place.HOST, False
    return None


class Each(Sequence[Action]):
    """One kind of action for several blocks, in the order of their keys: a list of them that takes less time.

    Args:
        kind: The kind, such as Offload.
        keys: Of the blocks.
    """

    __slots__ = ("keys", "kind")

    def __init__(self, kind: type[Action], keys: Iterable[int]) -> None:
        self.kind = kind
        self.keys = tuple(keys)

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, place: int) -> Action: ...
    @overload
    def __getitem__(self, place: slice) -> Each: ...
    def __getitem__(self, place: int | slice) -> Action | Each:
        if isinstance(place, slice):
            return Each(self.kind, self.keys[place])
        return self.kind(self.keys[place])


_key = attrgetter("key")


def by_kind(actions: Iterable[Action]) -> Iterable[tuple[type[Action], Sequence[int]]]:
    """The keys of actions, in their order; those of a kind that follow each other are together."""
    return ((kind, list(map(_key, group))) for kind, group in groupby(actions, type))
