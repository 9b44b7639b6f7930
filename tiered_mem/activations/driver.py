"""What layers save for backward, in blocks that move as a policy says, and what that is told of each step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch

from ..device.device import Device, DevicePeak
from ..device.fresh_pool import FreshPool
from ..device.torch_private import call_after_backward, current_backward
from ..device.transfer import TransferEngine
from ..errors import Closed
from ..ground.interrupts import uninterrupted
from ..ground.stats import Counters, Reason
from ..ground.turn import Turn
from ..policies.actions import (
    Action,
    Advice,
    Each,
    Fetch,
    Keep,
    Offload,
    OfLayer,
    Release,
    Reload,
    Retain,
    Spill,
    by_kind,
)
from ..policies.base import (
    BOUNDARIES,
    GATHERED_BYTES,
    POSITIONS,
    Dropped,
    Event,
    ExactMemory,
    ForwardBegin,
    ForwardEnd,
    LayerBegin,
    LayerEnd,
    LayerMemory,
    Memory,
    MoreBlocks,
    OnRequest,
    Policy,
    Recomputed,
    Refused,
    Saved,
    StepBegin,
    StepEnd,
    StepMeasured,
    Used,
)
from ..policies.places import Place
from ..trace.recorder import StepMeter, Trace
from .block import Block, SavedBlocks, View, held_by_others
from .movable import WORDS, Stayed
from .spiller import Spiller
from .store import BlockStore, actions_of, checked

# A program that lets no graph go has a step that never ends, and whoever records it would record for ever.
_MOST_EVENTS = 200_000


class Activations:
    """The service behind the offload contexts: takes saved tensors and gives them back. Of any thread.

    turn: taken by everything here. before: called in turn before anything else is done. after: called out of turn,
    after each event. begins: called out of turn before a pass through a forward, which it may refuse with an error.
    """

    def __init__(
        self,
        turn: Turn[Block],
        policy: Policy,
        store: BlockStore,
        watch: StepWatch,
        *,
        spiller: Spiller | None,
        trace: Trace | None,
        before: Sequence[Callable[[], None]],
        after: Callable[[], None],
        begins: Callable[[], None] | None = None,
    ) -> None:
        self._turn = turn
        self._actions = PolicyActions(policy, store, watch)
        self._store = store
        self._blocks = store.blocks
        self._spiller = spiller
        self._trace = trace
        self._traced = None if trace is None else TracedLayers(trace, turn)
        self._before = before
        self._after = after
        self._begins = begins
        self._graphs = itertools.count()
        self.closed = False
        # For a saved tensor that dies: its block is put there, and then that is called, from anywhere.
        self.dropped, self.free_dropped = turn.dropped, turn.free_dropped

    def new_graph(self) -> int:
        """A number for one pass through a forward. Raises Closed."""
        self.check_open()
        if self._begins is not None:
            self._begins()
        with self._turn:
            self._store.begin_step()
        graph = next(self._graphs)
        if self._spiller is not None:
            self._spiller.step = graph
        return graph

    def notify(self, event: Event) -> OfLayer | None:
        """Tells the policy and does what it answers. Returns what that has said of a layer."""
        with self._turn:
            self._actions.of_layer = None
            if self._traced is not None:
                self._traced.tell(event)
            for each in self._before:
                each()
            if self._spiller is not None:
                self._store.poll()
            self._actions.tell(event)
            of_layer = self._actions.of_layer
        self._after()
        if isinstance(of_layer, Keep) and (self._spiller is not None or self._trace is not None):
            return None  # a drive goes on with each event that comes, and a trace has them all
        return of_layer

    @uninterrupted
    def act(self, actions: Iterable[Advice]) -> None:
        """Does what a policy could have answered."""
        with self._turn:
            self.poll()
            self._actions.act(list(actions))

    def save(self, tensor: torch.Tensor, graph: int, layer: int) -> tuple[Block, View]:
        """Takes a tensor that a layer saves for backward: its block, and how it lies there.

        Whoever gets the block lets go of it once.
        """
        self._turn.take()
        try:
            if self._spiller is not None:
                self._store.poll()  # with each tensor; all else waits for the next event
            if (graph, layer) != self._actions.saver:
                self._actions.saves_come_from(graph, layer)
            block, view = self._blocks.save(tensor)
            block.saver = self._actions.saver
            if self._trace is not None and view.number == 0:
                self._trace.saved(graph, layer, block.nbytes)
            if self._blocks.saved_bytes >= self._actions.enough:
                try:
                    self._actions.tell_news()
                except BaseException:
                    self.dropped.append(block)  # nobody will get it
                    raise
            return block, view
        finally:
            self._turn.give()

    @uninterrupted
    def load(self, block: Block, view: View) -> torch.Tensor:
        """The saved tensor, on the device and ready for work that is issued now on the current stream.

        Raises ChangedTensor, or Closed where its bytes went with the manager.
        """
        self._turn.take()
        try:
            if self._spiller is not None:
                self._store.poll()
            if self._blocks.ended_bytes >= self._actions.enough:
                self._actions.tell_news()
            if self._actions.tells_uses:
                self._actions.tell(Used(*block.saver, block.key))
            return self._store.load(block, view)
        finally:
            self._turn.give()

    @uninterrupted
    def settle(self, storages: Collection[int]) -> None:
        """Work that is issued now on the current stream may change what is in these storages, by their ids."""
        if not self._turn.mine:  # then it is the manager's own
            with self._turn:
                self._store.settle(storages)

    def any_alive(self, keys: Iterable[int]) -> bool:
        """Whether any of the blocks is still needed."""
        with self._turn:
            return any(self._blocks.find(key) is not None for key in keys)

    def saved_of(self, storages: Mapping[int, Callable[[], torch.UntypedStorage | None]]) -> int:
        """The bytes of those of the storages, by their ids, that blocks have as a whole and on the device."""
        saved, spans = 0, self._blocks.by_span
        for number, reference in storages.items():
            storage = reference()
            if storage is not None and (number, 0, nbytes := storage.nbytes()) in spans:
                saved += nbytes
        return saved

    @uninterrupted
    def offloaded_bytes(self, keys: Iterable[int]) -> int:
        """The size of those of the blocks that are still needed and were offloaded, though they may be back."""
        with self._turn:
            blocks = (self._blocks.find(key) for key in set(keys))
            return sum(block.nbytes for block in blocks if block is not None and block.offloaded)

    def count_stayed(self, keys: Iterable[int], stayed: Stayed) -> int:
        """Counts those of the blocks that have not been offloaded. The size of the others."""
        with self._turn:
            blocks = [block for key in set(keys) if (block := self._blocks.find(key)) is not None]
            for block in blocks:
                if not block.offloaded:
                    stayed.add("no_room" if block.no_room else "policy", block.nbytes)
            return sum([block.nbytes for block in blocks if block.offloaded])

    def check_open(self) -> None:
        """Raises Closed after `close`."""
        if self.closed:
            raise Closed("the manager is closed: make a new one")

    def close(self) -> None:
        """No forward may begin any more. One that is under way keeps on the device what it saves from now on."""
        self.closed = self._actions.closed = True

    def poll(self) -> None:
        """To be called in turn: goes on with what was waiting for something to happen."""
        for each in self._before:
            each()
        self._store.poll()
        self._actions.tell_news()


class PolicyActions:
    """Does what a policy advises. One thread at a time.

    saver: the graph and the layer that blocks are saved by now.
    enough: so many bytes of blocks, saved or ended, the policy is told of before the next event. tells_uses: and of
    each use.
    of_layer: what it answered last of a layer.
    closed: the policy is told nothing any more.
    """

    def __init__(self, policy: Policy, store: BlockStore, watch: StepWatch) -> None:
        self._policy = policy
        self._blocks = store.blocks
        policy.follow(store.blocks)
        self._watch = watch
        self._listens = "asks" in vars(policy) or type(policy).asks is not Policy.asks
        self._do: dict[type[Any], Callable[[Sequence[Block]], None]] = {
            Offload: store.offload,
            Release: store.release,
            Reload: store.reload_early,
            Retain: store.retain,
            Spill: store.spill,
            Fetch: store.fetch,
        }
        self.tells_uses = False
        self._ask()
        self.saver = (0, 0)
        self.of_layer: OfLayer | None = None
        self.closed = False

    def tell(self, event: Event) -> None:
        """Tells the policy, with the news before it, and does what it answers."""
        if self._blocks.saved or self._blocks.ended:
            self.tell_news()
        self._tell(event)

    def saves_come_from(self, graph: int, layer: int) -> None:
        """Another layer is about to save blocks."""
        self.tell_news()
        self.saver = graph, layer

    def tell_news(self) -> None:
        """Tells the policy of the blocks that were saved and that have ended since it last heard of any."""
        if self._blocks.saved:
            self._tell(Saved(*self.saver, self._blocks.take_saved()))
        if self._blocks.ended:
            self._tell(Dropped(self._blocks.take_ended()))

    def act(self, answer: Iterable[Advice]) -> None:
        """Does what a policy has answered, or could have. Raises PolicyError before anything is done."""
        if not (answer.keys if type(answer) is Each else answer):
            return
        actions = checked(self._policy, answer)
        if type(actions) is not Each and not _OF_LAYERS.isdisjoint(map(type, actions)):
            self.of_layer = next(each for each in actions if isinstance(each, OfLayer))
            actions = actions_of(actions)
        for kind, keys in ((actions.kind, actions.keys),) if type(actions) is Each else by_kind(actions):
            # Advice about a block that is gone by now is passed over; the same advice twice is advice once.
            blocks = list(filter(None, map(self._blocks.find, dict.fromkeys(keys))))
            self._do[kind](blocks)
            if self._listens:
                self._tell_refused(kind, blocks)

    def _tell(self, event: Event) -> None:
        if self.closed:
            return
        if not self._listens:
            self.act(self._policy.decide(event))
            return
        for each in self._watch.before(event):
            self._tell_one(each)
        self._tell_one(event)

    def _tell_one(self, event: Event) -> None:
        policy, kind, asks = self._policy, type(event), self._policy.asks
        self._watch.note(event, asks)
        if kind in _ON_REQUEST and kind not in asks:
            return
        if not (between := kind in _BETWEEN) and (memory := self._watch.memory(event, asks)):
            self.act(policy.decide(memory))
        self.act(policy.decide(event))
        self._watch.answered(policy.asks, between=between)
        self._ask()

    def _ask(self) -> None:
        """What the policy wants to be told of next."""
        self.tells_uses = Used in self._policy.asks
        self.enough = min(GATHERED_BYTES, self._policy.gather_bytes)

    def _tell_refused(self, kind: type[Action], blocks: Sequence[Block]) -> None:
        for block in blocks:
            refused = block.place is Place.HOST if kind is Reload else block.no_room if kind is Offload else False
            if refused and Refused in self._policy.asks:
                self.act(self._policy.decide(Refused(kind(block.key))))


class StepWatch:
    """Follows the events that a policy is told. One thread at a time.

    A step begins with a forward that finds no block alive and no other forward under way, and ends where the next
    one begins: so its optimizer, and all else in between, are part of it.

    turn: is taken when a backward ends. counters: of what stays on the device.
    trace: that of the engine.
    """

    def __init__(
        self,
        device: Device,
        peak: DevicePeak,
        engine: TransferEngine,
        blocks: SavedBlocks,
        turn: Turn[Block],
        counters: Counters,
        trace: Trace | None,
    ) -> None:
        self._peak = peak
        self._counters = counters
        self._stayed: dict[Reason, int] = {}  # when the step began
        self._blocks = blocks
        self._meter = StepMeter(device, engine, trace)
        self._pool = FreshPool(device)
        self._number: int | None = None
        self._begun = 0
        self._events = 0
        self._forwards: set[int] = set()
        self._exact = False  # whether torch's peak has begun anew after the last answer
        self._backward = BackwardEnd(turn, peak.restore)
        self._held: dict[int, None] = {}  # the blocks of a step with exact memory that others may have

    def before(self, event: Event) -> Iterable[Event]:
        """What is to be told before an event: a step that was measured, ended, or begins.

        Each is to be noted and told before the next is asked for.
        """
        return self._before(event) if type(event) in _OF_FORWARDS or self._meter.ended else ()

    def _before(self, event: Event) -> Iterator[Event]:
        if (measured := self._meter.measured()) is not None:
            yield measured
        if isinstance(event, ForwardBegin):
            if not self._forwards and (not self._blocks.by_key or self._events > _MOST_EVENTS):
                if self._number is not None:
                    wait = self._exact
                    yield StepEnd(self._number, self._stayed_since())
                    while (measured := self._meter.measured(wait=wait)) is not None:
                        yield measured
                yield StepBegin(self._begun)
            self._forwards.add(event.graph)
        elif isinstance(event, ForwardEnd):
            self._forwards.discard(event.graph)

    def memory(self, event: Event, asks: Collection[type[Any]]) -> Memory | None:
        """What is allocated on the device, and the most since the last event was answered, for who asks for it."""
        at_layers = LayerMemory in asks
        if type(event) not in BOUNDARIES if at_layers else Memory not in asks and ExactMemory not in asks:
            return None
        allocated, peak, reserved, acting = self._peak.read()
        if self._exact:
            alive = filter(None, map(self._blocks.find, self._held))
            self._held = {block.key: None for block in held_by_others(alive)}
            return ExactMemory(allocated, peak, reserved, frozenset(self._held), acting)
        return (LayerMemory if at_layers else Memory)(allocated, peak, reserved)

    def answered(self, asks: Collection[type[Any]], *, between: bool) -> None:
        """What the policy has answered to an event is done, and now it asks for these.

        between: it was told nothing of memory at this event. What came before that is still to be told.
        """
        exact = ExactMemory in asks
        if between and exact == self._exact:
            return
        if exact and not self._exact:
            self._held = dict.fromkeys(self._blocks.by_key)  # of a step that has begun already
        self._exact = exact
        # Where nothing can move any more, nobody has to know all that comes and goes.
        if self._exact and (self._forwards or self._blocks.by_key):
            self._peak.begin_anew()
        else:
            self._peak.restore()

    def note(self, event: Event, asks: Collection[type[Any]]) -> None:
        """The event is told now, or would be, to a policy that asks for these."""
        if type(event) in POSITIONS:  # nearly all of them
            if self._number is not None:
                self._events += 1
                if self._exact and isinstance(event, Used):
                    # What comes after the backward is the user's, and the user may ask torch for the peak.
                    self._backward.expect()
                elif self._exact and isinstance(event, Saved):
                    self._held.update(dict.fromkeys(key for key, _ in event.blocks))
                if StepMeasured in asks:
                    self._meter.begin(self._number)
                self._meter.position()
        elif isinstance(event, StepBegin):
            self._number, self._begun, self._events = event.step, event.step + 1, 0
            self._pool.step_begins(recorded=ExactMemory in asks)
            self._stayed = {reason: moved.nbytes for reason, moved in self._counters.stayed.items()}
        elif isinstance(event, StepEnd):
            self._number = None
            self._meter.end()

    def _stayed_since(self) -> dict[str, int]:
        """The bytes of saved tensors that no policy heard of in this step, by reason."""
        now = {reason: moved.nbytes - self._stayed[reason] for reason, moved in self._counters.stayed.items()}
        return {WORDS[reason]: n for reason, n in now.items() if n > 0 and reason not in ("no_room", "policy")}


class TracedLayers:
    """Gets the events that a policy gets, in their order, and tells the trace of those about layers."""

    def __init__(self, trace: Trace, turn: Turn[Block]) -> None:
        self._trace = trace
        self._backward = BackwardEnd(turn, trace.backward_ends)

    def tell(self, event: Event) -> None:
        if isinstance(event, LayerBegin):
            self._trace.layer_begins(event.graph, event.layer, backward=event.backward)
            if event.backward:
                # Nothing but the engine knows when its last layer is through.
                self._backward.expect()
        elif isinstance(event, LayerEnd):
            self._trace.layer_ends(event.graph, event.layer)


class BackwardEnd:
    """Has something done in turn, once, when the backward that runs now is through."""

    def __init__(self, turn: Turn[Block], then: Callable[[], None]) -> None:
        self._turn = turn
        self._then = then
        self._expected = -1  # the last of torch's backwards whose end will be seen

    def expect(self) -> None:
        task = current_backward()
        if task not in (-1, self._expected):
            self._expected = task
            call_after_backward(self._ends)

    @uninterrupted
    def _ends(self) -> None:
        with self._turn:
            self._then()


# A step is measured for who asks for it, and that is told though nobody asks any more.
_ON_REQUEST = frozenset(get_args(OnRequest)) - {StepMeasured}
# Nothing is told of memory at these.
_BETWEEN = frozenset({StepMeasured, MoreBlocks, Recomputed})
_OF_FORWARDS = frozenset({ForwardBegin, ForwardEnd})
_OF_LAYERS = frozenset(get_args(OfLayer))
