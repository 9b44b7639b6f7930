"""The service that owns every block and moves it between the tiers as a policy says."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

from .block import Block, View
from .context import OffloadContext
from .device import Device
from .errors import Closed, PolicyError
from .host_limit import host_limit
from .pinned import host_pool
from .policies import Dropped, Event, Offload, Policy, Release, Reload, Saved, policy_by_name
from .sizes import format_bytes, parse_bytes
from .stats import Counters, flatten, summary
from .store import BlockStore
from .tiers import DeviceTier, HostTier
from .transfer import TransferEngine


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
        self._host = HostTier(host_pool(self.device, capacity))
        self._engine = TransferEngine(self.device)
        self._counters = Counters()
        self._store = BlockStore(DeviceTier(self.device), self._host, self._engine, self._counters)
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
            return flatten(self._counters, self._host.pool_stats(), self._host.slots, self._store.blocks)

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
            for block in list(self._store.blocks):
                self._store.retire(block)
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
            block = self._store.save(tensor)
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
            return self._store.load(block, view)

    def let_go(self, block: Block) -> None:
        """One saved tensor less needs the block. May be called from anywhere, from `__del__` too."""
        self._let_go.append(block)
        self._bury_let_go()

    # Under the lock.

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
                    block = self._let_go.popleft()
                    if self._store.let_go(block):
                        self._decide(Dropped(block.key))
            finally:
                self._lock.release()

    def _decide(self, event: Event) -> None:
        for kind, alike in itertools.groupby(self._policy.decide(event), type):
            actions = list(alike)
            if kind not in (Offload, Release, Reload):
                raise PolicyError(f"{type(self._policy).__name__} answered {actions[0]!r}, which is not an action")
            # Advice about a block that is gone by now is passed over.
            blocks = [block for action in actions if (block := self._store.find(action.key)) is not None]
            if kind is Offload:
                self._store.offload(blocks)
            elif kind is Release:
                self._store.release(blocks)
            else:
                self._store.reload_early(blocks)


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
