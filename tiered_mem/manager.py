"""The service that owns every block and moves it between the tiers as a policy says."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch

from .block import Block, Place, View, flat_bytes, span_of
from .context import OffloadContext
from .device import Device
from .errors import ChangedTensor, Closed, PolicyError, TierFull
from .host_limit import host_limit
from .pinned import host_pool
from .policies import Dropped, Event, Offload, Policy, Release, Reload, Saved, policy_by_name
from .sizes import format_bytes, parse_bytes
from .stats import Counters, flatten, summary
from .tiers import DeviceSlot, DeviceTier, HostSlot, HostTier
from .transfer import TransferEngine

_log = logging.getLogger("tiered_mem.manager")


class TieringManager:
    """Moves blocks between the device and host memory while a model trains.

    policy: a Policy, or the name of one ("layer-order").
    device: "npu", "cuda" or "cpu", with or without an index.
    host_bytes: the most host memory to use, an int of bytes or a string such as "64GiB". None is half of what this
        process may use: the cgroup's limit, or else the machine's RAM.

    Use it as a context manager, or call close(). Raises ValueError for arguments that cannot be right, and
    DeviceUnavailable for a device that this machine does not have.
    """

    def __init__(
        self, *, policy: Policy | str, device: str | torch.device = "npu", host_bytes: int | str | None = None
    ) -> None:
        self._policy = policy_by_name(policy) if isinstance(policy, str) else policy
        capacity = _host_capacity(host_bytes)
        self.device = Device(device)
        self._device_tier = DeviceTier(self.device)
        self._host = HostTier(host_pool(self.device, capacity))
        self._engine = TransferEngine(self.device)
        self._counters = Counters()
        self._blocks: dict[int, Block] = {}
        self._by_span: dict[tuple[int, int, int], Block] = {}
        self._keys = itertools.count()
        self._graphs = itertools.count()
        self._closed = False
        # One lock over bookkeeping and the issuing of copies. A saved tensor may die anywhere, even in the middle
        # of the code that holds the lock, so that its block is only put on this list, for whoever has the lock.
        self._lock = threading.Lock()
        self._let_go: deque[Block] = deque()

    def offload_context(
        self, layers: Iterable[torch.nn.Module], *, min_bytes: int | str = 1 << 20
    ) -> OffloadContext:
        """A context for the forward: `with manager.offload_context(model.layers): loss = model(batch)`.

        layers: the modules whose activations the policy may move, in the order of the forward. What other modules
            save stays on the device.
        min_bytes: smaller tensors stay on the device.

        Raises ValueError where the policy does not suit that many layers.
        """
        modules = list(layers)
        self._policy.check(len(modules))
        return OffloadContext(self, modules, parse_bytes(min_bytes))

    def stats(self) -> dict[str, int | str]:
        """Counters and sizes in bytes, under names such as "host.used.peak"."""
        with self._exclusive():
            self._host.collect()
            live = {place: [b for b in self._blocks.values() if b.place is place] for place in Place}
            return flatten(self._counters, self._host.pool_stats(), self._host.slots, live)

    def memory_summary(self) -> str:
        """The stats as a table."""
        return summary(str(self.device.torch_device), self.stats())

    def synchronize(self) -> None:
        """Waits on the host for every copy that was started, and takes back the slots they used."""
        with self._exclusive():
            self._engine.synchronize()
            self._host.collect()

    def close(self) -> None:
        """Waits for the copies under way and frees the host memory. Closing again does nothing.

        Activations that are still on the host are lost: a backward that needs them raises Closed.
        """
        with self._exclusive():
            if self._closed:
                return
            self._closed = True
            self._engine.synchronize()
            for block in list(self._blocks.values()):
                self._retire(block)
            self._host.close()

    def __enter__(self) -> TieringManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What the offload context calls.

    def new_graph(self) -> int:
        """A number for one pass through a forward."""
        if self._closed:
            raise Closed("the manager is closed: make a new one")
        return next(self._graphs)

    def notify(self, event: Event) -> None:
        """Tells the policy and does what it answers."""
        with self._exclusive():
            self._decide(event)

    def save(self, tensor: torch.Tensor, graph: int, layer: int) -> Block:
        """Takes a tensor that a layer saves for backward. Whoever gets the block lets go of it once."""
        with self._exclusive():
            block = self._block_of(tensor)
            block.holders += 1
            block.versions.append((tensor.detach(), tensor._version))
            try:
                self._decide(Saved(graph, layer, block.key, block.nbytes))
            except BaseException:
                self._let_go.append(block)  # nobody will get it
                raise
            return block

    def load(self, block: Block, view: View) -> torch.Tensor:
        """The saved tensor, on the device and ready for work that is issued now on the current stream.

        Raises ChangedTensor, or Closed where its bytes went with the manager.
        """
        with self._exclusive():
            if not block.unchanged():
                raise ChangedTensor(
                    f"a saved tensor of shape {tuple(view.shape)} was changed in place between forward and backward"
                )
            if block.place is Place.HOST:
                self._counters.reloads_on_demand += 1
                self._reload([block])
            if block.device is None:
                raise Closed("the manager was closed before this backward, and the activations with it")
            return self._arrived(block, block.device, view)

    def let_go(self, block: Block) -> None:
        """One saved tensor less needs the block. May be called from anywhere, from `__del__` too."""
        self._let_go.append(block)
        self._bury_let_go()

    # The decisions and moves, all under the lock.

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            self._bury_let_go()

    def _bury_let_go(self) -> None:
        """Whoever finds the lock free does it; who does not leaves it to the lock's holder, who comes here next."""
        while self._let_go and self._lock.acquire(blocking=False):
            try:
                while self._let_go:
                    self._drop_holder(self._let_go.popleft())
            finally:
                self._lock.release()

    def _drop_holder(self, block: Block) -> None:
        block.holders -= 1
        if block.holders == 0 and block.place is not Place.GONE:
            self._retire(block)
            self._decide(Dropped(block.key))

    def _decide(self, event: Event) -> None:
        for kind, alike in itertools.groupby(self._policy.decide(event), type):
            actions = list(alike)
            if kind not in (Offload, Release, Reload):
                raise PolicyError(f"{type(self._policy).__name__} answered {actions[0]!r}, which is not an action")
            # Advice about a block that is gone by now is passed over.
            blocks = [self._blocks[action.key] for action in actions if action.key in self._blocks]
            if kind is Offload:
                self._offload(blocks)
            elif kind is Release:
                self._release(blocks)
            else:
                self._reload_early(blocks)

    def _block_of(self, tensor: torch.Tensor) -> Block:
        """The block of the tensor's storage, a new one if it has none that holds the same contents."""
        span = span_of(tensor)
        known = self._by_span.get(span)
        if known is not None and known.unchanged() and known.versions[-1][1] == tensor._version:
            return known
        block = Block(next(self._keys), span, self._device_tier.adopt(flat_bytes(tensor, span)))
        self._blocks[block.key] = self._by_span[span] = block
        return block

    def _offload(self, blocks: Sequence[Block]) -> None:
        moves = []
        for block in blocks:
            if block.place is not Place.DEVICE or block.device is None or not block.unchanged():
                continue
            try:
                block.host = self._host.reserve(block.nbytes, before_waiting=self._counters.count_host_wait)
            except TierFull as error:
                self._keep(block, error)
                continue
            block.place = Place.LEAVING
            moves.append((block, block.device, block.host))
        if not moves:
            return
        try:
            ticket = self._engine.offload([(source, destination) for _, source, destination in moves])
        except BaseException:
            self._engine.synchronize()  # some of them may have been started
            for block, _, slot in moves:
                self._host.release(slot, None)
                block.host = None
                block.place = Place.DEVICE
            raise
        for block, _, _ in moves:
            block.ticket = ticket
            self._counters.offloaded.add(block.nbytes)

    def _keep(self, block: Block, error: TierFull) -> None:
        if self._counters.kept.count == 0:
            _log.warning("an activation stays on the device: %s. Later ones are only counted", error)
        self._counters.kept.add(block.nbytes)

    def _release(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.place is not Place.LEAVING or block.device is None or block.ticket is None:
                continue
            block.changed = not block.unchanged()
            block.ticket.hold(block.device.stream)
            block.place = Place.HOST
            self._forget_device(block)
            self._counters.released.add(block.nbytes)

    def _reload_early(self, blocks: Sequence[Block]) -> None:
        """On a policy's advice. Where the device is full now, backward will ask again when it must."""
        try:
            self._reload(blocks)
        except torch.OutOfMemoryError:
            self._counters.postponed += sum(block.place is Place.HOST for block in blocks)

    def _reload(self, blocks: Sequence[Block]) -> None:
        """Raises torch.OutOfMemoryError where the device has no room; what it had room for is on its way then."""
        moves = []
        try:
            for block in blocks:
                if block.place is Place.LEAVING:
                    self._stay(block)
                elif block.place is Place.HOST and block.host is not None:
                    block.device = self._device_tier.reserve(block.nbytes)
                    block.place = Place.ARRIVING
                    moves.append((block, block.host, block.device))
        finally:
            self._start_reloads(moves)

    def _start_reloads(self, moves: Sequence[tuple[Block, HostSlot, DeviceSlot]]) -> None:
        try:
            tickets = self._engine.reload([(source, slot, block.ticket) for block, source, slot in moves])
        except BaseException:
            self._engine.synchronize()
            for block, _, _ in moves:
                block.device = None
                block.place = Place.HOST
            raise
        for (block, source, slot), ticket in zip(moves, tickets, strict=True):
            block.ticket = ticket
            block.host = None
            block.versions = [(slot.tensor, slot.tensor._version)]
            self._host.release(source, ticket.event)
            self._counters.reloaded.add(block.nbytes)

    def _stay(self, block: Block) -> None:
        """The block is wanted before it was released: it has been on the device all the time."""
        if block.host is not None and block.ticket is not None:
            self._host.release(block.host, block.ticket.event)
        block.host = block.ticket = None
        block.place = Place.DEVICE

    def _arrived(self, block: Block, slot: DeviceSlot, view: View) -> torch.Tensor:
        tensor = view.of(slot.tensor)
        if block.place is Place.LEAVING or block.ticket is None:
            return tensor
        stream = self.device.current_stream()
        block.ticket.hold(stream)
        block.place = Place.DEVICE
        if stream.stream_id != slot.stream.stream_id:
            # The memory goes back to the pool of the stream it came from, which knows nothing of this one.
            tensor.record_stream(stream)  # type: ignore[arg-type]
        return tensor

    def _retire(self, block: Block) -> None:
        """Gives up all that a block has. What a copy still uses outlives the copy."""
        under_way = block.place in (Place.LEAVING, Place.ARRIVING)
        if under_way and block.device is not None and block.ticket is not None:
            block.ticket.hold(block.device.stream)
        if block.host is not None:
            self._host.release(block.host, block.ticket.event if block.ticket is not None else None)
        self._forget_device(block)
        block.host = block.ticket = None
        block.place = Place.GONE
        del self._blocks[block.key]

    def _forget_device(self, block: Block) -> None:
        block.device = None
        block.versions.clear()
        if self._by_span.get(block.span) is block:
            del self._by_span[block.span]


def _host_capacity(host_bytes: int | str | None) -> int:
    limit = host_limit()
    if host_bytes is None:
        return limit.nbytes // 2
    capacity = parse_bytes(host_bytes)
    if capacity > limit.nbytes:
        raise ValueError(
            f"host_bytes={host_bytes!r} is {format_bytes(capacity)}, more than {limit.source} allows "
            f"({format_bytes(limit.nbytes)})"
        )
    return capacity
