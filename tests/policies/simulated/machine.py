"""A device that does what a policy answers, as the manager's store does, without a device."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.policies.simulated.steps import Allocate, Compute, Drop, Save, Step, Use
from tiered_mem.policies import (
    Action,
    Dropped,
    Event,
    LayerBegin,
    LayerEnd,
    Offload,
    PlannedPolicy,
    Policy,
    Release,
    Reload,
    Retain,
    Saved,
    Spill,
)
from tiered_mem.policies.actions import How, Keep, OfLayer, Recompute
from tiered_mem.policies.base import (
    BOUNDARIES,
    GATHERED_BYTES,
    ExactMemory,
    LayerMemory,
    Memory,
    Recomputed,
    Refused,
    StepBegin,
    StepEnd,
    StepMeasured,
    Used,
)
from tiered_mem.policies.places import Place, Placed, Places
from tiered_mem.policies.planning import Link

OUT, BACK = 0, 1


class Queues:
    """Copies in two directions, one after another in each, which slow each other down while both are busy.

    noise: gives for each copy a factor for its time. busy: the seconds in which each direction had copies.
    """

    def __init__(self, link: Link, noise: Callable[[], float]) -> None:
        self.link = link
        self._noise = noise
        self._now = 0.0
        self._waiting: tuple[deque[list[float]], deque[list[float]]] = (deque(), deque())
        self._ends: dict[int, float] = {}
        self._count = itertools.count()
        self.busy = [0.0, 0.0]
        self.moved = [0, 0]

    def start(self, direction: int, nbytes: int, now: float) -> int:
        """Begins a copy as soon as those before it have ended. Its number."""
        self._run(until=now)
        copy = next(self._count)
        rate = self._rates()[direction]
        self.moved[direction] += nbytes
        self._waiting[direction].append([(nbytes + self.link.latency * rate) * self._noise(), copy])
        return copy

    def end(self, copy: int) -> float:
        """When a copy has ended, or will if no other one begins."""
        while copy not in self._ends:
            self._run()
        return self._ends[copy]

    def _rates(self) -> tuple[float, float]:
        return self.link.out, self.link.back

    def _run(self, until: float = float("inf")) -> None:
        """Goes on to that time; without one, until the next copy ends."""
        once = until == float("inf")
        while self._now < until:
            busy = [bool(queue) for queue in self._waiting]
            if not any(busy):
                self._now = until
                return
            share = self.link.both if all(busy) else 1.0
            rates = [rate * share for rate in self._rates()]
            first = min(queue[0][0] / rate for queue, rate in zip(self._waiting, rates, strict=True) if queue)
            seconds = min(first, until - self._now)
            self._now += seconds
            for direction, (queue, rate) in enumerate(zip(self._waiting, rates, strict=True)):
                if queue:
                    self.busy[direction] += seconds
                    queue[0][0] -= seconds * rate
                    if queue[0][0] <= 1e-3:
                        self._ends[int(queue.popleft()[1])] = self._now
            if once:
                return


@dataclass
class Outcome:
    """What a step took. stalls: the seconds in which compute waited. on_demand: reloads that nobody advised.

    copied: bytes out and back. log: all that was answered, with the events.
    """

    seconds: float = 0.0
    stalls: float = 0.0
    peak: int = 0
    on_demand: int = 0
    copied: tuple[int, int] = (0, 0)
    log: list[tuple[Event, Sequence[Action]]] = field(default_factory=list)


class Block(Placed):
    """copy: the newest one. retained: its bytes stay on the host when it is reloaded. backup: they did."""

    __slots__ = ("backup", "copy", "graph", "layer", "retained")

    def __init__(self, key: int, nbytes: int, graph: int, layer: int) -> None:
        super().__init__(key, nbytes)
        self.graph = graph
        self.layer = layer
        self.copy: int | None = None
        self.backup = self.retained = False


class Machine:
    """Runs steps under a policy. Memory is counted when work is issued; time passes on three queues.

    capacity: bytes of the device; an early reload beyond it is refused. host: bytes of the host tier,
    which may be changed between steps.
    fragments: bytes that lie between others. gathers: the policy says how many bytes of blocks it is told of
    together, as a PlannedPolicy does in any case.
    noise: each time of compute and of copies is off by up to this share.
    """

    def __init__(
        self,
        policy: Policy,
        link: Link,
        *,
        capacity: int | None = None,
        host: int | None = None,
        fragments: int = 0,
        noise: float = 0.0,
        seed: int = 0,
        gathers: bool = False,
    ) -> None:
        self.policy = policy
        self.link = link
        self.places: Places[Block] = Places()
        self.blocks = self.places.by_key
        policy.follow(self.places)
        self._capacity = capacity
        self.host = host
        self._fragments = fragments
        self._noise = noise
        self._rng = random.Random(seed)
        self._gathers = gathers or isinstance(policy, PlannedPolicy)
        self._steps = itertools.count()
        self._graphs = 0
        self._keys = 0
        self.level = 0  # bytes on the device
        self.on_host = 0
        self._peak, self._heard = 0, False
        self._exact = False
        self._of_layer: OfLayer | None = None
        self._saver = -1, -1
        self._saved: list[tuple[int, int]] = []  # keys and sizes that the policy has not been told of
        self._ended: list[tuple[int, int]] = []
        self._kept: set[tuple[int, int]] = set()  # the graphs and layers whose saved tensors are autograd's own
        self._unknown: dict[int, int] = {}  # the sizes of these, by what would be their keys
        self._tried: set[tuple[int, How]] = set()
        self.treated: dict[int, How] = {}  # layers of the last step that were computed again
        self._begin()

    @property
    def asks(self) -> frozenset[type[Event]]:
        return frozenset(self.policy.asks)

    def run(
        self, step: Step, *, lost: Sequence[int] = (), remade: Callable[[Mapping[int, How]], Step] | None = None
    ) -> Outcome:
        """Runs a step. lost: places in its code at which an instruction is left out, as after an exception.

        remade: makes the step with layers that are computed again, as the policy answers. The first time of each
        layer is a trial, which keeps all. Without it no layer can be.

        What is alive at the end is told of in the next step, when it is dropped.
        """
        number = next(self._steps)
        self._begin()
        self._peak = self.level
        self.request(StepBegin(number))
        keys = range(self._keys, self._keys + 10_000)
        graphs = self._graphs
        self.treated = {}
        place = -1
        while (place := place + 1) < len(step.code):
            each = step.code[place]
            if place in lost:
                continue
            match each:
                case Compute(seconds, work):
                    self._compute(seconds * self._factor(), work)
                case Allocate(nbytes):
                    self.allocate(nbytes)
                case Save(block):
                    saved = step.blocks[block]
                    graph = graphs + saved.graph
                    if (graph, saved.layer) not in self._kept:
                        self.save(keys[block], graph, saved.layer, saved.nbytes)
                    elif keys[block] not in self.blocks:
                        self.allocate(saved.nbytes)
                        self._unknown[keys[block]] = saved.nbytes
                case Use(block):
                    if keys[block] in self.blocks:
                        self.use(keys[block])
                case Drop(block):
                    if keys[block] in self.blocks:
                        self.drop(keys[block])
                    self.level -= self._unknown.pop(keys[block], 0)
                case LayerEnd() | LayerBegin() if (graphs + each.graph, each.layer) in self._kept:
                    pass
                case _:
                    self.tell(replace(each, graph=graphs + each.graph))
                    if isinstance(self._of_layer, Keep):
                        first = self._of_layer.layer
                        kept = range(first, first + self._of_layer.layers)
                        self._kept.update((graphs + each.graph, layer) for layer in kept)
                    elif self._of_layer is not None and remade is not None:
                        step = self._treat(self._of_layer, graphs + each.graph, step, remade)
        self._keys += len(step.blocks)
        self._graphs += 1 + max((block.graph for block in step.blocks), default=0)
        self.request(StepEnd(number))
        self.outcome.seconds = self._now
        self.outcome.copied = self._queues.moved[OUT], self._queues.moved[BACK]
        if self._positions:
            rates = [m / b if b else 0.0 for m, b in zip(self._queues.moved, self._queues.busy, strict=True)]
            self.act(self.policy.decide(StepMeasured(number, self._positions, self.outcome.stalls, *rates)))
        return self.outcome

    def _treat(
        self, answer: Recompute, graph: int, step: Step, remade: Callable[[Mapping[int, How]], Step]
    ) -> Step:
        tried = (answer.layer, answer.how) in self._tried
        self._tried.add((answer.layer, answer.how))
        if tried:
            self.treated[answer.layer] = answer.how
        if Recomputed in self.asks:
            self.policy.decide(Recomputed(graph, answer.layer, trial=not tried))
        return remade(self.treated)

    def save(self, key: int, graph: int, layer: int, nbytes: int) -> None:
        """A layer saves a block, which may be there already."""
        if key not in self.blocks:
            self.allocate(nbytes)
            self.places.add(Block(key, nbytes, graph, layer))
        if self._saver != (graph, layer):
            self._tell_news()
            self._saver = graph, layer
        self._saved.append((key, nbytes))
        self._tell_news(self._enough)

    def use(self, key: int) -> None:
        """Backward asks for a block."""
        block = self.blocks[key]
        if Used in self.asks:
            self.tell(Used(block.graph, block.layer, key))
        if block.place is Place.HOST:
            self.outcome.on_demand += 1
            self._reload(key, block)
        if block.place is Place.ARRIVING:
            self._wait(block)
            self.places.move(block, Place.DEVICE)

    def drop(self, key: int) -> None:
        """Nobody needs a block any more."""
        block = self.blocks[key]
        if block.place is not Place.HOST:
            self.level -= block.nbytes
        if block.backup or block.place in (Place.HOST, Place.LEAVING):
            self.on_host -= block.nbytes
        self.places.remove(block)
        self._ended.append((key, block.nbytes))
        self._tell_news(self._enough)

    @property
    def _enough(self) -> int:
        """So many bytes of blocks are told together, by who says so."""
        return min(GATHERED_BYTES, self.policy.gather_bytes) if self._gathers else 1

    def _tell_news(self, enough: int = 1) -> None:
        """Tells of blocks, if so many bytes were saved or have ended."""
        if sum(nbytes for _, nbytes in self._saved) >= enough or sum(nbytes for _, nbytes in self._ended) >= enough:
            saved, self._saved = self._saved, []
            if saved:
                self._tell(Saved(*self._saver, saved))
            ended, self._ended = self._ended, []
            if ended:
                self._tell(Dropped([key for key, _ in ended]))

    def tell(self, event: Event) -> None:
        """Tells the policy, with the news before it, and does what it answers."""
        self._tell_news()
        self._tell(event)

    def _tell(self, event: Event) -> None:
        if self._positions or StepMeasured in self.asks:
            self._positions.append(0.0)
        self._tell_memory(event)
        advice = self.policy.decide(event)
        self._of_layer = next((each for each in advice if isinstance(each, OfLayer)), None)
        answer = [each for each in advice if not isinstance(each, OfLayer)]
        self.outcome.log.append((event, answer))
        self.act(answer)
        self._answered()

    def _begin(self) -> None:
        self.outcome = Outcome(peak=self.level)
        self._queues = Queues(self.link, self._factor)
        for block in self.blocks.values():  # copies of an earlier step have ended
            block.copy = None
            if block.place is Place.ARRIVING:
                self.places.move(block, Place.DEVICE)
        self._now = 0.0
        self._positions: list[float] = []

    def request(self, event: Event) -> None:
        """Tells what only those hear of who ask for it."""
        self._tell_news()
        if type(event) in self.asks:
            self._tell_memory(event)
            self.act(self.policy.decide(event))
            self._answered()

    def _tell_memory(self, event: Event) -> None:
        asks = self.asks
        at_layers = LayerMemory in asks
        if type(event) in BOUNDARIES if at_layers else Memory in asks or ExactMemory in asks:
            kind = LayerMemory if at_layers else ExactMemory if self._exact else Memory
            self.policy.decide(kind(self.level, max(self._peak, self.level), self.level + self._fragments))
            self._heard = True

    def _answered(self) -> None:
        if self._heard:
            self._peak, self._heard = self.level, False
        self._exact = ExactMemory in self.asks

    def act(self, answer: Sequence[Action]) -> None:
        """Does what a policy answers."""
        for kind, group in itertools.groupby(answer, type):
            keys = [action.key for action in group if action.key in self.blocks]
            if kind is Offload:
                self._offload(keys)
            elif kind is Release:
                for key in keys:
                    self._release(self.blocks[key])
            elif kind is Reload:
                for key in keys:
                    block = self.blocks[key]
                    if self._capacity is not None and self.level + block.nbytes > self._capacity:
                        self._refuse(Reload(key))
                    else:
                        self._reload(key, block)
            elif kind is Retain:
                for key in keys:
                    self.blocks[key].retained = self.blocks[key].place in (Place.LEAVING, Place.HOST)
            else:  # there is no disk, but whoever spilled a block may fetch it
                for key in keys:
                    self.blocks[key].sinking = kind is Spill

    def _offload(self, keys: Sequence[int]) -> None:
        """What leaves together is one copy."""
        going = []
        for key in keys:
            block = self.blocks[key]
            if block.place is Place.DEVICE and block.backup:
                self.places.move(block, Place.LEAVING)
                block.backup = False
            elif block.place is Place.DEVICE:
                if self.host is not None and self.on_host + block.nbytes > self.host:
                    self._refuse(Offload(key))
                    continue
                going.append(block)
                self.on_host += block.nbytes
        if going:
            copy = self._queues.start(OUT, sum(block.nbytes for block in going), self._now)
            for block in going:
                self.places.move(block, Place.LEAVING)
                block.copy = copy

    def _release(self, block: Block) -> None:
        if block.place is Place.LEAVING:
            self._wait(block)
            self.places.move(block, Place.HOST)
            self.level -= block.nbytes

    def _reload(self, key: int, block: Block) -> None:
        if block.place is Place.LEAVING:
            self.places.move(block, Place.DEVICE)
            self.on_host -= block.nbytes
            block.retained = False
        elif block.place is Place.HOST:
            self.allocate(block.nbytes)
            if block.retained:
                block.backup, block.retained = True, False
            else:
                self.on_host -= block.nbytes
            self.places.move(block, Place.ARRIVING)
            block.sinking = False
            block.copy = self._queues.start(BACK, block.nbytes, self._now)

    def _refuse(self, action: Action) -> None:
        if Refused in self.asks:
            self.act(self.policy.decide(Refused(action)))

    def _wait(self, block: Block) -> None:
        """Compute waits for the block's copy."""
        if block.copy is not None:
            stall = self._queues.end(block.copy) - self._now
            if stall > 0:
                self.outcome.stalls += stall
                self._now += stall

    def _compute(self, seconds: float, work: int) -> None:
        self.allocate(work)
        self.allocate(-work)
        self._now += seconds
        if self._positions:
            self._positions[-1] += seconds

    def allocate(self, nbytes: int) -> None:
        """Memory that is no block comes; goes, with a negative number."""
        self.level += nbytes
        self._peak = max(self._peak, self.level)
        self.outcome.peak = max(self.outcome.peak, self.level)

    def _factor(self) -> float:
        return 1 + self._rng.uniform(-self._noise, self._noise) if self._noise else 1.0


def backwards(step: Step) -> list[int]:
    """The places in a step's code at which the backward of a layer begins."""
    return [place for place, each in enumerate(step.code) if isinstance(each, LayerBegin) and each.backward]
