"""What a policy is, and what it is told. What it may answer is in `actions`.

A policy sees integers only: `key` names a block, `graph` one pass through a forward, `layer` the position of a
layer in the order in which the layers of this forward begin. It runs, and is tested, without a device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .actions import Action, Advice
from .places import Places

# Blocks that were saved or dropped are told together, once so many bytes of them have come.
GATHERED_BYTES = 64 << 20


class Policy:
    """Decides what is offloaded when, and when it is brought back. A subclass overrides `decide`.

    A policy is advice. The manager fetches a block that is needed whatever the policy said of it, and takes no
    notice of an action that a block's state rules out, so that the worst policy costs time and never a number.

    Attributes:
        asks: Of the types in `OnRequest`, those that it is to be told. It is read anew before each event.
        gather_bytes: It is told of blocks once they come to so many bytes, or to 64 MiB. That is read anew with
            each answer of a policy that asks for anything.
        plans_spills: While it is true, HostPressure is told only when nothing under way makes room.
        places: Where the blocks are. They are read only, and known from `follow` on.
    """

    asks: Collection[type[OnRequest]] = ()
    gather_bytes: int = GATHERED_BYTES
    plans_spills: bool = False
    places: Places[Any]

    def follow(self, places: Places[Any]) -> None:
        """Begins to work for the manager that moves these blocks. Called before the first event.

        Args:
            places: Where the blocks are, now and later.
        """
        self.places = places

    def check(self, num_layers: int) -> None:
        """Looks whether a model suits the policy.

        Args:
            num_layers: How many layers it has.

        Raises:
            ValueError: It does not.
        """

    def decide(self, event: Event) -> Sequence[Advice]:
        """Answers an event. Called under the manager's lock: never blocks.

        Args:
            event: What happens next, or has happened.

        Returns:
            The actions to take now, in order: a list, or `Each`. () for events that it does not handle.
        """
        return ()

    def lacks(self, nbytes: int) -> int:
        """Where a context chooses itself from which size on tensors are blocks, smaller ones become blocks by this.

        Args:
            nbytes: As many come that are no blocks.

        Returns:
            The bytes that the device then lacks, though all leaves that can.
        """
        return 0

    @property
    def name(self) -> str:
        """Names it in messages."""
        return type(self).__name__


class ManualPolicy(Policy):
    """Advises nothing: users decide themselves when a layer leaves the device and when it comes back."""


class Decides(Protocol):
    """The least that is taken for a policy."""

    def check(self, num_layers: int) -> None: ...

    def decide(self, event: Event) -> Sequence[Advice]: ...


class Adapted(Policy):
    """A policy of somebody's own, which is no Policy.

    Raises TypeError where it has more of one than `check` and `decide`: only of a Policy that is read.
    """

    def __init__(self, own: Decides) -> None:
        more = [name for name in ("asks", "gather_bytes", "plans_spills", "lacks", "follow") if hasattr(own, name)]
        if more:
            raise TypeError(
                f"{type(own).__name__} has {', '.join(more)}, which are looked for in policies that derive from "
                "tiered_mem.policies.Policy: derive it from that"
            )
        self._own = own
        self.check, self.decide = own.check, own.decide  # type: ignore[method-assign]

    @property
    def name(self) -> str:
        return type(self._own).__name__


@dataclass(frozen=True, slots=True)
class ForwardBegin:
    """A forward through a model begins.

    Args:
        graph: Names this forward from now on.
        num_layers: How many layers are expected. It may turn out that more or fewer of them run.
    """

    graph: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class LayerBegin:
    """A layer's forward begins, or its backward.

    Backwards come in any order, and also between forwards. One may be told several times, or of a graph that has no
    blocks any more.

    Args:
        graph: The forward.
        layer: The layer's position in it.
        backward: It is the layer's backward.
        inputs: The bytes of the tensors that its forward is called with; 0 where that is not known.
    """

    graph: int
    layer: int
    backward: bool = False
    inputs: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """A layer's forward has ended. All that it saves is known, but for blocks that are saved between layers.

    Args:
        graph: The forward.
        layer: The layer's position in it.
        unsaved_inputs: Of the tensors that its forward was called with, the bytes that no block has.
    """

    graph: int
    layer: int
    unsaved_inputs: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ForwardEnd:
    """The forward has ended. It may have ended early, by an exception.

    Args:
        graph: The forward.
    """

    graph: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A layer saved blocks for backward, or they were saved after its end and before the next layer.

    Told when the layer ends, or earlier once 64 MiB have gathered, or as many as the policy's `gather_bytes`.
    A block that a later layer saves too is told again, with that layer.

    Args:
        graph: The forward.
        layer: The layer's position in it.
        blocks: The key of each and its size in bytes, in the order of the saves.
    """

    graph: int
    layer: int
    blocks: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Dropped:
    """Nobody needs these blocks any more. Told before the next event, or when as many bytes have gone as are
    gathered for `Saved`.

    Args:
        keys: Of the blocks.
    """

    keys: Sequence[int]


@dataclass(frozen=True, slots=True)
class HostPressure:
    """Blocks in the host tier should go down to disk. Only told where there is a disk tier.

    Told when the host is nearly full, and when a slot is missing. Either may be while the Offload actions of an
    answer are done, before the actions that follow them. A slot is also missing where backward needs a block that
    is on disk, and where a module is offloaded. Of the answer only Release and Spill are done. The policy is told
    again, with what is still missing, until it answers nothing new.

    Args:
        nbytes: As many bytes should go.
    """

    nbytes: int


@dataclass(frozen=True, slots=True)
class Used:
    """Backward asks for a block that this layer saved. Told before anything waits, and again for each further use.

    A block that is not on the device is brought back next, whatever the answer.
    """

    graph: int
    layer: int
    key: int


@dataclass(frozen=True, slots=True)
class StepBegin:
    """A step of training begins; its first forward has not. `step` names it from now on."""

    step: int


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The step is over, with its optimizer, or by an exception. Blocks may be alive still.

    stayed: the bytes of saved tensors that were no blocks of it and stayed on the device, by the reason, in words.
    """

    step: int
    stayed: Mapping[str, int] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Memory:
    """What is allocated on the device, by whomever, in bytes: now, and at most since the last answer was done.

    reserved: with what torch's pool cannot give back, because it lies between tensors; 0 where that is not known.

    Told right before each other event but StepMeasured, MoreBlocks, Recomputed, HostPressure and Refused. Of that
    event's blocks, those that are saved are allocated already, and those that are dropped are freed. What came and
    went in between counts where torch's own peak has risen.
    """

    device: int
    peak: int
    reserved: int = 0


@dataclass(frozen=True, slots=True)
class ExactMemory(Memory):
    """What is told as Memory, with all that came and went in between, to a policy that asks for it in its place.

    To know it, torch's own peak is begun anew after each answer, and users may want to read that: so it is for
    steps that are recorded. At the end of such a step the host waits for the device, and tells StepMeasured before
    the next one begins.

    held: the blocks that somebody beside backward has, such as the forward that goes on. To release one of them now
    frees no memory.
    acting: the most that was allocated while the last answer was done, which may bring blocks before others go.
    """

    held: Collection[int] = ()
    acting: int = 0


@dataclass(frozen=True, slots=True)
class LayerMemory(Memory):
    """What is told as Memory, to a policy that asks for this, but only before steps and forwards begin or end, and
    before layers begin. To ask torch takes longer than most of what is done for a block."""


@dataclass(frozen=True, slots=True)
class MoreBlocks:
    """From now on smaller tensors are blocks too, as the policy `lacks` memory. Steps have more of them."""

    graph: int


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A layer's forward has gone as a `Recompute` has it: it keeps little, and is computed again in backward.

    It comes before the layer's end. Where that is answered and this is not told, the layer keeps all that it saves.

    trial: the manager looks whether it comes out the same. It keeps all, and is computed again as well.
    results, unsaved: in a trial as "full", the bytes that "cheap" would keep, and at most beside what it saves.
    """

    graph: int
    layer: int
    trial: bool
    results: int = 0
    unsaved: int = 0


@dataclass(frozen=True, slots=True)
class StepMeasured:
    """How long a step took on the device, if a policy asks for it. Told some time later, between any two events.

    seconds: for each position of the step, from the first at which the policy asked for it, the compute time to the
        next, without stalls. Positions are the events that the policy was told from StepBegin to StepEnd, these two
        left out, and Memory, StepMeasured, MoreBlocks, Recomputed, HostPressure and Refused left out.
    stalls: the seconds in which compute waited for copies. waits: those at each position, or empty. states: those
        for optimizer states, outside of step(). out, back: bytes each second of copies from and to the device,
        alone if some were; 0 without any. both: each way's share of that beside the other; 0 if it is not known.
    """

    step: int
    seconds: Sequence[float]
    stalls: float
    out: float = 0.0
    back: float = 0.0
    waits: Sequence[float] = ()
    states: float = 0.0
    both: float = 0.0


@dataclass(frozen=True, slots=True)
class Refused:
    """An action of an answer could not be done, and the block is where it was.

    A Reload that found the device full, or an Offload that found no room on the host.
    """

    action: Action


# Told to a policy that asks for it.
OnRequest = (
    Used
    | StepBegin
    | StepEnd
    | Memory
    | ExactMemory
    | LayerMemory
    | StepMeasured
    | MoreBlocks
    | Recomputed
    | Refused
)
Event = ForwardBegin | LayerBegin | LayerEnd | ForwardEnd | Saved | Dropped | HostPressure | OnRequest
# The positions of a step.
POSITIONS = frozenset({ForwardBegin, LayerBegin, Saved, LayerEnd, ForwardEnd, Used, Dropped})
# Before these comes LayerMemory.
BOUNDARIES: frozenset[type[Event]] = frozenset({StepBegin, StepEnd, ForwardBegin, ForwardEnd, LayerBegin})
