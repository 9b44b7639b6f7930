"""What a policy is told and what it may answer.

A policy sees integers only: `key` names a block, `graph` one pass through a forward, `layer` the position of a
layer in the order in which the layers of this forward begin. It runs, and is tested, without a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Policy(Protocol):
    """Decides what is offloaded when, and when it is brought back.

    A policy is advice. The manager fetches a block that is needed whatever the policy said of it, and takes no
    notice of an action that a block's state rules out, so that the worst policy costs time and never a number.
    """

    def check(self, num_layers: int) -> None:
        """Raises ValueError if a model of this many layers does not suit the policy."""

    def decide(self, event: Event) -> Sequence[Action]:
        """The actions to take now, in order. Called under the manager's lock: never blocks."""


@dataclass(frozen=True, slots=True)
class ForwardBegin:
    """A forward through a model of `num_layers` layers begins. It may turn out that more or fewer of them run."""

    graph: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class LayerBegin:
    """A layer's forward begins, or its backward.

    Backwards come in any order, and also between forwards. One may be told several times, or of a graph that has no
    blocks any more.
    """

    graph: int
    layer: int
    backward: bool = False


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """A layer's forward has ended. All that it saves is known, but for blocks that are saved between layers."""

    graph: int
    layer: int


@dataclass(frozen=True, slots=True)
class ForwardEnd:
    """The forward has ended. It may have ended early, by an exception."""

    graph: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A layer saved a block for backward, or it was saved after the layer's end and before the next one.

    A block that a later layer saves too is told again, with that layer.
    """

    graph: int
    layer: int
    key: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """Nobody needs the block any more."""

    key: int


@dataclass(frozen=True, slots=True)
class HostPressure:
    """`nbytes` bytes of the host tier should go down to disk. Only told where there is a disk tier.

    Told when the host is nearly full, and when a slot is missing. Either may be while the Offload actions of an
    answer are done, before the actions that follow them. A slot is also missing where backward needs a block that
    is on disk, and where a module is offloaded. Of the answer only Release and Spill are done. The policy is told
    again, with what is still missing, until it answers nothing new.
    """

    nbytes: int


Event = ForwardBegin | LayerBegin | LayerEnd | ForwardEnd | Saved | Dropped | HostPressure


@dataclass(frozen=True, slots=True)
class Offload:
    """Begin to copy the block to the host. It stays on the device until it is released."""

    key: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give up the block's device memory: work issued from now on waits, on the device, for its copy to end."""

    key: int


@dataclass(frozen=True, slots=True)
class Reload:
    """Begin to copy the block back to the device; one that is on disk is read first."""

    key: int


@dataclass(frozen=True, slots=True)
class Spill:
    """Begin to write a block that is on the host to disk. Its host memory is free when the file is complete.

    Does nothing for a block that is elsewhere.
    """

    key: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Begin to read a block that is on disk into host memory, so that a later Reload finds it there.

    Does nothing for a block that is elsewhere.
    """

    key: int


Action = Offload | Release | Reload | Spill | Fetch
