"""Keep a number of bytes on the device: the least recently used blocks leave, and are back for their backward."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..sizes import format_bytes, parse_bytes
from .actions import Action, Fetch, Offload, Release, Reload, Spill
from .base import Dropped, Event, HostPressure, LayerBegin, Policy, Saved


class LRUPolicy(Policy):
    """Keeps at most `device_bytes` of saved blocks on the device, whatever layers saved them.

    Where more than half of that is on the device and not leaving, the least recently used blocks begin to leave,
    until three eighths are left. The other half is for blocks on their way out: their memory is given up only where
    the budget would be passed otherwise, so that copies have time to run beside compute. Saving a block again
    counts as a use. A block that is larger than the budget leaves at once.

    In backward blocks come back in the reverse order of their saving, before they are needed, and as many bytes
    beyond those are fetched from disk. Blocks that backward has used and still holds are the first to leave again.
    Under host pressure the blocks that left the longest ago go to disk.

    Args:
        device_bytes: An int of bytes or a string such as "4GiB". The policy hears of blocks when a sixteenth of
            that has been saved, or 64 MiB: by so much the device may hold more.
        read_ahead: The bytes that may be back before backward needs them; at least one block is. None is a quarter
            of device_bytes.

    Raises:
        ValueError: A size is below 1 byte, or read_ahead is above device_bytes.
    """

    def __init__(self, device_bytes: int | str = "1GiB", *, read_ahead: int | str | None = None) -> None:
        self._budget = parse_bytes(device_bytes, "device_bytes")
        self._read_ahead = (
            max(1, self._budget // 4) if read_ahead is None else parse_bytes(read_ahead, "read_ahead")
        )
        if self._read_ahead > self._budget:
            raise ValueError(
                f"read_ahead must be at most device_bytes, which is {format_bytes(self._budget)}, "
                f"not {format_bytes(self._read_ahead)}"
            )
        self.gather_bytes = self._budget // 16
        self._blocks: dict[int, _Block] = {}
        self._graphs: dict[int, _Graph] = {}
        # A block is in one of these, or of its graph's, at a time.
        self._used = _Queue(on_device=True)
        self._resident = _Queue(on_device=True)
        self._leaving = _Queue(on_device=True, away=True)
        self._on_host = _Queue(away=True)
        self._on_disk = _Queue(away=True)
        self._on_device = 0

    def decide(self, event: Event) -> Sequence[Action]:
        match event:
            case Saved(graph, layer, blocks):
                return self._save(graph, layer, blocks)
            case Dropped(keys):
                return self._drop(keys)
            case LayerBegin(graph, layer, backward=True):
                if graph in self._graphs:
                    return self._begin_backward(self._graphs[graph], layer)
            case HostPressure(nbytes):
                return self._spill(nbytes)
        return ()

    def _save(self, number: int, layer: int, blocks: Iterable[tuple[int, int]]) -> list[Action]:
        graph = self._graphs.get(number)
        if graph is None:
            graph = self._graphs[number] = _Graph(number)
        offloads: list[Action] = []
        releases: list[Action] = []
        for key, nbytes in blocks:
            graph.blocks += 1
            needed = layer
            before = self._blocks.get(key)
            if before is not None:
                if before.graph is graph:
                    needed = max(layer, before.layer)  # backward needs it there first
                self._forget(before)
            block = self._blocks[key] = _Block(key, needed, nbytes, graph)
            self._move(block, self._resident)
            if nbytes > self._budget:
                offloads.append(self._offload(block))
                releases.append(self._release(block))
        offloads += self._start_leaving(self._used, self._resident)
        return [*offloads, *releases, *self._release_until(self._budget)]

    def _drop(self, keys: Sequence[int]) -> list[Action]:
        going_on: dict[int, _Graph] = {}
        for key in keys:
            block = self._blocks.get(key)
            if block is not None:
                self._forget(block)
                # What a backward drops it has used. Lower layers are dropped where the graph goes unused.
                if block.graph.reached is not None and block.layer >= block.graph.reached:
                    going_on[block.graph.number] = block.graph
        return self._bring_back(*(graph for graph in going_on.values() if graph.blocks))

    def _forget(self, block: _Block) -> None:
        self._move(block, None)
        del self._blocks[block.key]
        block.graph.blocks -= 1
        if not block.graph.blocks:
            del self._graphs[block.graph.number]

    def _start_leaving(self, *queues: _Queue) -> list[Action]:
        """Where too much stays, blocks of these begin to leave."""
        actions: list[Action] = []
        staying = self._on_device - self._leaving.nbytes
        if staying > self._budget // 2:
            for queue in queues:
                while staying > self._budget * 3 // 8 and (oldest := queue.first()) is not None:
                    staying -= oldest.nbytes
                    actions.append(self._offload(oldest))
        return actions

    def _release_until(self, nbytes: int) -> list[Action]:
        """Releases leaving blocks until at most `nbytes` are on the device, or none is leaving."""
        actions: list[Action] = []
        while self._on_device > nbytes and (oldest := self._leaving.first()) is not None:
            actions.append(self._release(oldest))
        return actions

    def _begin_backward(self, graph: _Graph, layer: int) -> list[Action]:
        another = graph.reached is None or layer > graph.reached
        limit = None if another else layer
        for block in reversed(graph.too_large.until(limit) + graph.coming.until(limit)):
            self._move(block, self._on_host)
        for block in graph.back.until(limit):
            self._move(block, self._resident if another else self._used)
        if graph.reached not in (None, layer):
            # Backward was through with that layer, and reloaded what was not back. It will hardly need it again.
            for _, _, key in graph.away[graph.below(graph.reached) : graph.below(graph.reached + 1)]:
                if self._blocks[key].queue is not self._leaving:
                    self._move(self._blocks[key], self._used)
        graph.reached = layer
        return [*self._start_leaving(self._used), *self._release_until(self._budget), *self._bring_back(graph)]

    def _bring_back(self, *graphs: _Graph) -> list[Action]:
        releases: list[Action] = []
        reloads: list[Action] = []
        fetches: list[Action] = []
        for graph in graphs:
            while (block := graph.coming.first() or self._next_away(graph)) is not None:
                if block.nbytes > self._budget:
                    fetches += self._recall(block, graph.too_large)
                    continue
                if not graph.back.takes(block, self._read_ahead):
                    break
                if block.queue is not self._leaving:
                    if self._on_device - self._leaving.nbytes + block.nbytes > self._budget:
                        break
                    releases += self._release_until(self._budget - block.nbytes)
                self._recall(block, graph.back)
                reloads.append(Reload(block.key))
            while (block := self._next_away(graph)) is not None and graph.coming.takes(block, self._read_ahead):
                if block.queue is self._leaving:
                    break
                fetches += self._recall(block, graph.coming)
        return releases + reloads + fetches

    def _next_away(self, graph: _Graph) -> _Block | None:
        """The block that backward needs next of those that are away."""
        place = 0 if graph.reached is None else graph.below(graph.reached + 1)
        return self._blocks[graph.away[place - 1][2]] if place else None

    def _recall(self, block: _Block, to: _Queue) -> list[Action]:
        """Backward will need the block soon: it is fetched if it was spilled."""
        spilled = block.queue is self._on_disk
        self._move(block, to)
        return [Fetch(block.key)] if spilled else []

    def _spill(self, nbytes: int) -> list[Action]:
        releases: list[Action] = []
        spills: list[Action] = []
        while nbytes > 0 and (block := self._on_host.first() or self._leaving.first()) is not None:
            if block.queue is self._leaving:
                releases.append(self._release(block))
            self._move(block, self._on_disk)
            spills.append(Spill(block.key))
            nbytes -= block.nbytes
        return releases + spills

    def _offload(self, block: _Block) -> Action:
        self._move(block, self._leaving)
        return Offload(block.key)

    def _release(self, block: _Block) -> Action:
        self._move(block, self._on_host)
        return Release(block.key)

    def _move(self, block: _Block, to: _Queue | None) -> None:
        """Moves the block from its queue to the end of another; None is out of all."""
        before, block.queue = block.queue, to
        key, nbytes, graph = block.key, block.nbytes, block.graph
        if before is not None:
            del before.blocks[key]
            before.nbytes -= nbytes
            self._on_device -= nbytes * before.on_device
        if to is not None:
            to.blocks[key] = block
            to.nbytes += nbytes
            self._on_device += nbytes * to.on_device
        if to is None or not to.away:
            if block.away is not None:
                del graph.away[bisect_left(graph.away, block.away)]
                block.away = None
        elif block.away is None:
            graph.left += 1
            block.away = block.layer, graph.left, key
            insort(graph.away, block.away)


@dataclass(eq=False, slots=True)
class _Block:
    """`layer` is the last layer that saved the block. `queue` tells where it is, as far as the policy knows.

    away: its entry among its graph's blocks that are away.
    """

    key: int
    layer: int
    nbytes: int
    graph: _Graph
    queue: _Queue | None = None
    away: tuple[int, int, int] | None = None


@dataclass(slots=True)
class _Queue:
    """Blocks in the order in which they came.

    away: they left the device, or begin to, and are not on their way back.
    """

    on_device: bool = False
    away: bool = False
    nbytes: int = 0
    blocks: OrderedDict[int, _Block] = field(default_factory=OrderedDict)

    def first(self) -> _Block | None:
        return next(iter(self.blocks.values()), None)

    def until(self, layer: int | None) -> list[_Block]:
        """The first blocks, before one of this layer or of one below; None is all of them."""
        above = itertools.takewhile(lambda block: layer is None or block.layer > layer, self.blocks.values())
        return list(above)

    def takes(self, block: _Block, limit: int) -> bool:
        """Whether the block fits under the limit. One block always does."""
        return not self.blocks or self.nbytes + block.nbytes <= limit


@dataclass(slots=True)
class _Graph:
    """One forward, and the progress of its backward.

    back: blocks that are on the device again, and not yet used.
    coming: the blocks that follow next.
    too_large: blocks that the budget has no room for. Backward reloads them itself when it must.
    reached: the layer whose backward began last. Blocks of the layers above come back on demand only.
    left: how often one of its blocks has left.
    away: the blocks that are away, sorted: the layer, which of those that left it was, and the key.
    """

    number: int
    blocks: int = 0
    back: _Queue = field(default_factory=lambda: _Queue(on_device=True))
    coming: _Queue = field(default_factory=_Queue)
    too_large: _Queue = field(default_factory=_Queue)
    reached: int | None = None
    left: int = 0
    away: list[tuple[int, int, int]] = field(default_factory=list)

    def below(self, layer: int) -> int:
        """How many of the blocks that are away belong to layers below this one."""
        return bisect_left(self.away, (layer, 0, 0))
