"""The service that owns every block and moves it between the tiers as a policy says."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType

import torch

from .allocators import HostPool
from .block import Block, View
from .chosen_tiers import disk_tier, host_tier
from .context import OffloadContext
from .device import Device
from .errors import Closed, PolicyError
from .host_budget import HostBytes
from .layer_context import LayerContext, LayerSequence
from .module_phases import ModulePhases
from .movable import Movable
from .optimizer.registered import RegisteredOptimizers, Residency
from .optimizer.tiered_optimizer import TieredOptimizer
from .policies import (
    Action,
    Dropped,
    Event,
    Fetch,
    HostPressure,
    LayerBegin,
    LayerEnd,
    Offload,
    Policy,
    Release,
    Reload,
    Saved,
    Spill,
    policy_by_name,
)
from .repeated_blocks import repeated_blocks
from .sizes import format_bytes, parse_bytes
from .spill.disk_tier import DiskTier
from .spiller import Spiller
from .stats import Counters, Stats, flatten, summary
from .store import BlockStore
from .tiers import DeviceTier, HostTier
from .trace import Trace, summary_rows
from .transfer import TransferEngine


class TieringManager:
    """Moves blocks between the device and host memory while a model trains.

    policy: a Policy, or the name of one ("layer-order", "lru").
    device: "npu", "cuda" or "cpu", with or without an index.
    host_bytes: the most host memory to use: an int of bytes, a string such as "64GiB", or a float up to 1 for that
        share of what this process may use, which is the smallest of the machine's RAM and its cgroups' limits,
        divided by LOCAL_WORLD_SIZE, the number of processes on the machine. "auto", or None, is half of it.
    pin: how the host memory is pinned. True is the best way that torch recognises on this machine; False is not at
        all, and the host then waits at each copy. "try" is True, or else False with a warning. The name of a source
        (docs/tuning.md lists them) is that one.
    preallocate: pin all of host_bytes now, and not while a step waits for it. None is yes, but no for "auto", which
        is a limit and not a wish.
    host_pool: a pool to use in place of one of its own. It is not closed with the manager, and managers may share
        one. Then none of the three arguments before this one is given.
    spill_dir: a directory on a local drive. What the host tier has no room for goes there, in files that nobody
        else can read and that are gone when the manager is closed. None is no disk tier.
    spill_bytes: the most that these files may take, an int of bytes or a string such as "1TiB". None is half of
        what is free in spill_dir.
    spill_write_budget: the most bytes to write in all, for the sake of the drive; then the tier takes no more.
    spill_checksum: "xxh3_64", "crc32" or "none". None is "xxh3_64" if the package xxhash is installed, or "crc32".
    disk: a disk tier to use in place of one of its own. It is closed with the manager. Then none of the four
        arguments before this one is given.
    transfer_stream: a stream of the device for the copies in both directions. None is two streams of its own, so
        that copies to the host and to the device run side by side.
    trace: record when layers, copies and waits begin and end, for export_trace() and memory_summary(). It costs a
        few events for each layer.

    Use it as a context manager, or call close(); one that is forgotten frees its host memory when the last
    activation in it is gone. Raises ValueError for arguments that cannot be right, DeviceUnavailable for a device
    that this machine does not have, and PinningFailed where host memory cannot be had as asked.
    """

    def __init__(
        self,
        *,
        policy: Policy | str,
        device: str | torch.device = "npu",
        host_bytes: HostBytes = None,
        pin: bool | str = True,
        preallocate: bool | None = None,
        host_pool: HostPool | None = None,
        spill_dir: str | os.PathLike[str] | None = None,
        spill_bytes: int | str | None = None,
        spill_write_budget: int | str | None = None,
        spill_checksum: str | None = None,
        disk: DiskTier | None = None,
        transfer_stream: torch.Stream | None = None,
        trace: bool = False,
    ) -> None:
        self._policy = policy_by_name(policy) if isinstance(policy, str) else policy
        self.device = Device(device)
        self._disk = disk_tier(spill_dir, spill_bytes, spill_write_budget, spill_checksum, disk)
        try:
            self._host = host_tier(self.device, host_bytes, pin, preallocate, host_pool)
        except BaseException:
            if self._disk is not None and disk is None:
                self._disk.close()
            raise
        self._trace = Trace(self.device) if trace else None
        self._backward = -1
        stream = None if transfer_stream is None else self.device.generic(transfer_stream)
        self._engine = TransferEngine(self.device, stream, self._trace)
        self._counters = Counters()
        self._spiller = None if self._disk is None else Spiller(self._host, self._disk, self._counters)
        self._store = BlockStore(
            DeviceTier(self.device),
            self._host,
            self._engine,
            self._counters,
            partial(_advise, self._policy),
            self._trace,
            self._spiller,
        )
        self._phases = ModulePhases(self.device, self._host, self._engine, self._store.make_room)
        self._do = {
            Offload: self._store.offload,
            Release: self._store.release,
            Reload: self._store.reload_early,
            Spill: self._store.spill,
            Fetch: self._store.fetch,
        }
        self._optimizers = RegisteredOptimizers(
            self.device, self._engine, self._host, self._disk, partial(_exclusive, weakref.ref(self))
        )
        self._graphs = itertools.count()
        self._closed = False
        # One lock over bookkeeping and the issuing of copies. A saved tensor may die anywhere, even in the middle
        # of the code that holds the lock, so that its block is only put on this list, for whoever has the lock.
        self._lock = threading.Lock()
        self._let_go: deque[Block] = deque()
        self._postponed: list[Action] = []  # what a policy answered when a block died, maybe within a `__del__`
        weakref.finalize(self, _abandon, self._engine, self._host, self._disk).atexit = False

    def offload_context(
        self, layers: Iterable[torch.nn.Module] | torch.nn.Module, *, min_bytes: int | str = 1 << 20
    ) -> OffloadContext:
        """A context for the forward: `with manager.offload_context(model.layers): loss = model(batch)`.

        layers: the modules whose activations the policy may move. What other modules save stays on the device,
            except for a layer's inputs. Of a whole model its repeated blocks are taken.
        min_bytes: smaller tensors stay on the device.

        Raises ValueError where the policy does not suit that many layers, a model's layers cannot be found, or the
        disk tier is too small for any block.
        """
        if isinstance(layers, torch.nn.Module) and not isinstance(layers, torch.nn.ModuleList):
            modules = repeated_blocks(layers)
        else:
            modules = list(layers)
        self._policy.check(len(modules))
        movable = Movable(self.device, modules, min_bytes=self._smallest(min_bytes))
        return OffloadContext(self, modules, movable)

    def layer_context(
        self, num_layers: int, *, min_bytes: int | str = 1 << 20, variable_depth: bool = True
    ) -> LayerContext:
        """A context to be entered for each layer, where the loop over the layers is the user's own.

        num_layers: how many layers one forward has. With several microbatches in flight: layers x microbatches.
        min_bytes: smaller tensors stay on the device.
        variable_depth: a forward may have fewer layers. Say False for a pipeline, where the first layers may be
            through with their backward before the next ones begin.

        Raises ValueError where the policy does not suit that many layers.
        """
        self._policy.check(num_layers)
        movable = Movable(self.device, (), min_bytes=self._smallest(min_bytes))
        return LayerContext(LayerSequence(self, movable, num_layers, variable_depth=variable_depth))

    def register_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        bucket_bytes: int | str = "256MiB",
        residency: Residency = "host",
    ) -> TieredOptimizer:
        """The optimizer to use from now on, in place of the one that is given: its states leave the device.

        optimizer: any that can step some of its parameters at a time, as LBFGS cannot. It may have states already.
            They are tried out with copies of its smallest parameters, and of one of each shape.
        bucket_bytes: half of the device memory that states pass through during a step; more where the state of one
            parameter alone is larger.
        residency: where the states rest between steps. "host" is pinned host memory. "disk" is the disk tier, by
            way of a few buckets of host memory. "device-until-offload" is the device, until `offload` is called.

        Raises ValueError for an optimizer that is registered, or cannot be tiered, TierFull where there is no room
        for all states, and Closed.
        """
        self._check_open()
        return self._optimizers.register(
            optimizer, bucket_bytes=parse_bytes(bucket_bytes), residency=residency, owner=self
        )

    def offload(self, thing: torch.nn.Module | TieredOptimizer, *, gradients: bool = False) -> None:
        """Takes a module or the states of a tiered optimizer off the device until `reload`.

        Of a module that are its parameters and buffers, and with gradients=True those. They go to host memory,
        which is kept for the next time. Waits for the copies; then the device memory is free. What is away already,
        or on another device, stays where it is. A tensor of a module that is used meanwhile raises Offloaded. An
        optimizer can be stepped all the same.

        Raises OffloadRefused where others use the same memory, or a tensor cannot leave; TierFull where the host
        tier has no room; Closed; TypeError for anything else. Nothing has moved then.
        """
        if isinstance(thing, TieredOptimizer):
            thing.states.offload()
            return
        self._can_phase(thing)
        with _Exclusive(self):
            self._check_open()
            self._go_on()
            self._phases.offload(thing, gradients=gradients, owner=self)

    def reload(self, thing: torch.nn.Module | TieredOptimizer) -> None:
        """Brings back all that `offload` took, for work that is issued from now on.

        States whose residency is "host" or "disk" are where they belong, and stay there.

        The host does not wait for the copies, but the current stream does. Without an offload nothing happens.
        Raises torch.OutOfMemoryError where the device has no room; then all of it stays away. Raises
        OffloadRefused where another manager has it, and TypeError for anything else.
        """
        if isinstance(thing, TieredOptimizer):
            thing.states.reload()
            return
        self._can_phase(thing)
        with _Exclusive(self):
            self._go_on()
            self._phases.reload(thing)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the manager is closed: make a new one")

    def _can_phase(self, thing: object) -> None:
        if not isinstance(thing, torch.nn.Module):
            raise TypeError(
                "offload and reload take a torch.nn.Module, or what register_optimizer returned, not "
                f"{type(thing).__name__}"
            )

    def _smallest(self, min_bytes: int | str) -> int:
        nbytes = parse_bytes(min_bytes)
        if self._disk is not None and self._disk.capacity < nbytes:
            raise ValueError(
                f"spill_bytes is {format_bytes(self._disk.capacity)}, and no block is below min_bytes, which "
                f"is {format_bytes(nbytes)}: none would fit. Raise the one or lower the other"
            )
        return nbytes

    def stats(self) -> Stats:
        """Counters and sizes in bytes, under names such as "host.used.peak"."""
        self._optimizers.bury()
        with _Exclusive(self):
            self._go_on()
            self._host.collect()
            disk = None if self._disk is None else self._disk.stats()
            stats = flatten(self._counters, self._host.pool_stats(), self._host.slots, self._store.blocks, disk)
            return stats | self._phases.stats()

    def memory_summary(self) -> str:
        """The stats as a table: what moved, and with trace=True how much of it was hidden and who waited."""
        return summary(str(self.device.torch_device), self.stats(), self._overlap())

    def export_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes what was recorded as a Chrome trace, which Perfetto opens. RuntimeError without trace=True."""
        with _Exclusive(self):
            if self._trace is None:
                raise RuntimeError("nothing was recorded: make the manager with trace=True")
            self._trace.export(path)

    def synchronize(self) -> None:
        """Waits on the host for every copy and file operation that was started; takes back the slots they used."""
        self._optimizers.settle()
        with _Exclusive(self):
            self._engine.synchronize()
            self._store.settle()
            self._host.collect()

    def close(self) -> None:
        """Waits for the copies under way and frees the host memory. Closing again does nothing.

        Activations that are still on the host are lost: a backward that needs them raises Closed. So are the states
        of tiered optimizers: take their state_dict() before. Modules that are offloaded come back to the device.
        What it has no room for stays on the host, outside of the host tier, and `reload` still brings it back.
        Where the runtime of the device does not take host memory back, its error is raised, and close may be called
        again.
        Raises DeviceFailed where the device dropped copies after a failure.
        """
        with _Exclusive(self):
            self._closed = True
        self._optimizers.close()
        with _Exclusive(self):
            for block in list(self._store.blocks):
                self._store.retire(block)
            self._phases.close()
            self._engine.synchronize()
            self._store.settle()
            if self._disk is not None:
                self._disk.close()
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
        self._check_open()
        graph = next(self._graphs)
        if self._spiller is not None:
            self._spiller.step = graph
        return graph

    def notify(self, event: Event) -> None:
        """Tells the policy and does what it answers."""
        with _Exclusive(self):
            if self._trace is not None:
                self._tell(self._trace, event)
            self._go_on()
            self._act(self._policy.decide(event))
        self._optimizers.progress()

    def act(self, actions: Iterable[Action]) -> None:
        """Does what a policy could have answered. With ManualPolicy it is how blocks move at all."""
        with _Exclusive(self):
            self._go_on()
            self._act(list(actions))

    def save(self, tensor: torch.Tensor, graph: int, layer: int) -> tuple[Block, View]:
        """Takes a tensor that a layer saves for backward: its block, and how it lies there.

        Whoever gets the block lets go of it once.
        """
        with _Exclusive(self):
            self._go_on()
            block, view = self._store.save(tensor)
            if self._trace is not None and view.number == 0:
                self._trace.saved(graph, layer, block.nbytes)
            try:
                self._act(self._policy.decide(Saved(graph, layer, block.key, block.nbytes)))
            except BaseException:
                self._let_go.append(block)  # nobody will get it
                raise
            return block, view

    def any_alive(self, keys: Iterable[int]) -> bool:
        """Whether any of the blocks is still needed."""
        with _Exclusive(self):
            return any(self._store.find(key) is not None for key in keys)

    def offloaded_bytes(self, keys: Iterable[int]) -> int:
        """The size of those of the blocks that are still needed and were offloaded, though they may be back."""
        with _Exclusive(self):
            blocks = (self._store.find(key) for key in set(keys))
            return sum(block.nbytes for block in blocks if block is not None and block.offloaded)

    def load(self, block: Block, view: View) -> torch.Tensor:
        """The saved tensor, on the device and ready for work that is issued now on the current stream.

        Raises ChangedTensor, or Closed where its bytes went with the manager.
        """
        with _Exclusive(self):
            self._go_on()
            return self._store.load(block, view)

    def let_go(self, block: Block) -> None:
        """One saved tensor less needs the block. May be called from anywhere, from `__del__` too."""
        self._let_go.append(block)
        self._bury_let_go()

    # Under the lock.

    def _go_on(self) -> None:
        self._phases.bury()
        self._store.progress()
        if self._postponed:
            actions, self._postponed = self._postponed, []
            self._act(actions)

    def _bury_let_go(self) -> None:
        """Whoever finds the lock free does it; who does not leaves it to the lock's holder, who comes here next."""
        while self._let_go and self._lock.acquire(blocking=False):
            try:
                while self._let_go:
                    block = self._let_go.popleft()
                    if self._store.let_go(block):
                        self._postponed += self._policy.decide(Dropped(block.key))
            finally:
                self._lock.release()

    def _tell(self, trace: Trace, event: Event) -> None:
        if isinstance(event, LayerBegin):
            trace.layer_begins(event.graph, event.layer, backward=event.backward)
            task = torch._C._current_graph_task_id()
            if event.backward and task not in (-1, self._backward):
                # Nothing but the engine knows when its last layer is through.
                self._backward = task
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        elif isinstance(event, LayerEnd):
            trace.layer_ends(event.graph, event.layer)

    def _backward_ends(self) -> None:
        with _Exclusive(self):
            if self._trace is not None:
                self._trace.backward_ends()

    def _overlap(self) -> list[tuple[str, str]]:
        with _Exclusive(self):
            if self._trace is None:
                return [("overlap", "not measured: it takes trace=True")]
            return summary_rows(self._trace.figures())

    def _act(self, actions: Sequence[Action]) -> None:
        if not actions:
            return
        for kind, group in itertools.groupby(actions, type):
            alike = list(group)
            if kind not in self._do:
                raise PolicyError(f"{type(self._policy).__name__} answered {alike[0]!r}, which is not an action")
            # Advice about a block that is gone by now is passed over; the same advice twice is advice once.
            keys = dict.fromkeys(action.key for action in alike)
            blocks = [block for key in keys if (block := self._store.find(key)) is not None]
            self._do[kind](blocks)


def _advise(policy: Policy, nbytes: int) -> Sequence[Action]:
    """What a policy lets go down to disk, so that so many bytes of host memory come free."""
    return policy.decide(HostPressure(nbytes))


def _abandon(engine: TransferEngine, host: HostTier, disk: DiskTier | None) -> None:
    """Whoever could still use a block has a reference to the manager, and there is none."""
    engine.synchronize()
    if disk is not None:
        disk.close()
    host.abandon()


def _exclusive(manager: weakref.ref[TieringManager]) -> contextlib.AbstractContextManager[None]:
    """For those whom the manager outlives, or who hold it: not a reference that would keep it alive in a cycle."""
    found = manager()
    return contextlib.nullcontext() if found is None else _Exclusive(found)


class _Exclusive:
    """Inside, a manager's bookkeeping is this thread's alone. Afterwards what was let go of meanwhile is buried."""

    __slots__ = ("_manager",)

    def __init__(self, manager: TieringManager) -> None:
        self._manager = manager

    def __enter__(self) -> None:
        self._manager._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._manager._lock.release()
        if self._manager._let_go:
            self._manager._bury_let_go()
