"""What layers save for backward, in blocks that move as a policy says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch

from ..errors import Closed
from ..interrupts import uninterrupted
from ..policies import Action, Event, LayerBegin, LayerEnd
from ..trace.recorder import Trace
from ..turn import Turn
from .block import Block, View
from .block_store import BlockStore
from .movable import Stayed
from .policy_actions import PolicyActions
from .spiller import Spiller


class Activations:
    """The service behind the offload contexts: takes saved tensors and gives them back. Of any thread.

    turn: taken by everything here. before: called in turn before anything else is done. after: called out of turn,
    after each event.
    """

    def __init__(
        self,
        turn: Turn[Block],
        actions: PolicyActions,
        store: BlockStore,
        *,
        spiller: Spiller | None,
        traced: TracedLayers | None,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        self._turn = turn
        self._actions = actions
        self._store = store
        self._blocks = store.blocks
        self._spiller = spiller
        self._traced = traced
        self._before = before
        self._after = after
        self._graphs = itertools.count()
        self._closed = False
        # For a saved tensor that dies: its block is put there, and then that is called, from anywhere.
        self.dropped, self.bury = turn.dropped, turn.bury

    def new_graph(self) -> int:
        """A number for one pass through a forward. Raises Closed."""
        self.check_open()
        with self._turn:
            self._store.begin_step()
        graph = next(self._graphs)
        if self._spiller is not None:
            self._spiller.step = graph
        return graph

    def notify(self, event: Event) -> None:
        """Tells the policy and does what it answers."""
        with self._turn:
            if self._traced is not None:
                self._traced.tell(event)
            self._before()
            self._store.progress()
            self._actions.tell(event)
        self._after()

    @uninterrupted
    def act(self, actions: Iterable[Action]) -> None:
        """Does what a policy could have answered."""
        with self._turn:
            self.go_on()
            self._actions.act(list(actions))

    def save(self, tensor: torch.Tensor, graph: int, layer: int) -> tuple[Block, View]:
        """Takes a tensor that a layer saves for backward: its block, and how it lies there.

        Whoever gets the block lets go of it once.
        """
        self._turn.take()
        try:
            if self._spiller is not None:
                self._store.progress()  # with each tensor; all else waits for the next event
            if (graph, layer) != self._actions.saver:
                self._actions.saves_come_from(graph, layer)
            block, view = self._blocks.save(tensor)
            if self._traced is not None and view.number == 0:
                self._traced.saved(graph, layer, block.nbytes)
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
                self._store.progress()
            if self._blocks.ended_bytes >= self._actions.enough:
                self._actions.tell_news()
            return self._store.load(block, view)
        finally:
            self._turn.give()

    def any_alive(self, keys: Iterable[int]) -> bool:
        """Whether any of the blocks is still needed."""
        with self._turn:
            return any(self._blocks.find(key) is not None for key in keys)

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
        if self._closed:
            raise Closed("the manager is closed: make a new one")

    def close(self) -> None:
        """No forward may begin any more."""
        self._closed = True

    def go_on(self) -> None:
        """To be called in turn: goes on with what was waiting for something to happen."""
        self._before()
        self._store.progress()
        self._actions.tell_news()


class TracedLayers:
    """Gets the events that a policy gets, in their order, and tells the trace of those about layers."""

    def __init__(self, trace: Trace, turn: Turn[Block]) -> None:
        self._trace = trace
        self._turn = turn
        self._backward = -1

    def tell(self, event: Event) -> None:
        if isinstance(event, LayerBegin):
            self._trace.layer_begins(event.graph, event.layer, backward=event.backward)
            task = torch._C._current_graph_task_id()
            if event.backward and task not in (-1, self._backward):
                # Nothing but the engine knows when its last layer is through.
                self._backward = task
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        elif isinstance(event, LayerEnd):
            self._trace.layer_ends(event.graph, event.layer)

    def saved(self, graph: int, layer: int, nbytes: int) -> None:
        self._trace.saved(graph, layer, nbytes)

    @uninterrupted
    def _backward_ends(self) -> None:
        with self._turn:
            self._trace.backward_ends()
