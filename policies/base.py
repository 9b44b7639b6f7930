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

    One that counts bytes may have an attribute `gather_bytes`: it is told of blocks once they come to so many.
    """

    def check(self, num_layers: int) -> None:
        """Raises ValueError if a model of this many layers does not suit the policy."""

    def decide(self, event: Event) -> Sequence[Action]:
        """The actions to take now, in order. Called under the manager's lock: never blocks."""


class ManualPolicy:
    """Advises nothing: users decide themselves when a layer leaves the device and when it comes back."""

    def check(self, num_layers: int) -> None:
        """Suits every model."""

    def decide(self, event: Event) -> Sequence[Action]:
        return ()


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
    """A layer saved blocks for backward, or they were saved after its end and before the next layer.

    Told when the layer ends, or earlier once 64 MiB have gathered, or as many as the policy's `gather_bytes`.
    A block that a later layer saves too is told again, with that layer.

    blocks: the key of each and its size in bytes, in the order of the saves.
    """

    graph: int
    layer: int
    blocks: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Dropped:
    """Nobody needs these blocks any more. Told before the next event, or when as many bytes have gone as are
    gathered for `Saved`.
    """

    keys: Sequence[int]


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
