"""The service that owns every block and moves it between the tiers as a policy says."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import weakref
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, SupportsIndex

import torch

from .activations.attachment import Attachment
from .activations.contexts import Contexts, LayerContext, OffloadContext
from .activations.driver import Activations, StepWatch
from .activations.spiller import Spiller
from .activations.store import BlockStore
from .agreement import agreed
from .allocators.base import HostPool
from .choose_policy import PolicyChoice
from .device.device import Device, DevicePeak
from .device.transfer import TransferEngine
from .errors import DeviceFailed
from .ground.arguments import instance, yes_or_no
from .ground.interrupts import Interrupts, uninterrupted
from .ground.stats import Counters, Stats
from .ground.turn import Turn
from .optimizer.registered import Overlap, RegisteredOptimizers, Residency
from .optimizer.tiered_optimizer import TieredOptimizer
from .phases.absence import Absence
from .phases.modules import ModulePhases
from .pictures.drawing import draw, drawable
from .pictures.timeline import Timeline
from .policies import Action, PlannedPolicy, Policy
from .policies.actions import How
from .policies.planning.report import Report
from .report import ScalarWriter, flatten, plan_report, stats_rows, summary
from .sizes import parse_bytes
from .spill.chosen import SpillDir, chosen_tier
from .spill.lower_tier import LowerTier
from .tiers.host_budget import HostBytes
from .tiers.host_tier import HostTier
from .tiers.node_budget import NodeBudget
from .tiers.pinning import host_tier
from .trace.recorder import Trace, summary_rows
from .trace.records import Levels

_log = logging.getLogger("tiered_mem.manager")


class TieringManager:
    """Moves blocks between the device and host memory while a model trains.

    Use it as a context manager, or call close(); one that is forgotten frees its host memory when the last
    activation in it is gone.

    Args:
        policy: A Policy, or the name of one ("layer-order", "lru"). "auto" keeps all device memory below
            device_budget and plans for the least waiting, by what it sees of the first step. It measures the link
            when it is made. On the cpu, which counts no memory, it is "layer-order".
        device_budget: With "auto", the bytes of the device for everything, such as "60GiB"; None is what there
            is, less fragments (as measured).
        slowdown: With "auto", how much longer a step may take, as 0.05, where that saves memory.
        device: "npu", "cuda" or "cpu", with or without an index; None is the accelerator that there is.
        host_bytes: The most host memory to use: an int of bytes, a string such as "64GiB", or a float up to 1 for
            that share of what this process may use, which is the smallest of the machine's RAM and its cgroups'
            limits (or what TIERED_MEM_HOST_LIMIT says in their place), divided by LOCAL_WORLD_SIZE, the number of
            processes on the machine, less what other managers of this process may take. "auto", or None, is half
            of it.
        pin: How the host memory is pinned. True is the best way that torch recognises on this machine; False is
            not at all, and the host then waits at each copy. "try" is True, or else False with a warning. The
            name of a source (docs/tuning.md lists them) is that one.
        preallocate: Pin all of host_bytes now, and not while a step waits for it. None is yes, but no for "auto",
            which is a limit and not a wish.
        host_pool: A pool to use in place of one of its own. It is not closed with the manager, and managers may
            share one. Then none of the three arguments before this one is given.
        spill_dir: A directory on a local drive. What the host tier has no room for goes there, in files that
            nobody else can read and that are gone when the manager is closed. A list of directories, one on each
            drive, is as fast as the drives together. None is no disk tier.
        spill_bytes: The most that these files may take in all, an int of bytes or a string such as "1TiB". None is
            half of what is free on each drive.
        spill_write_budget: The most bytes to write in all, for the sake of the drive.
        spill_checksum: "xxh3_64", which None is too, "crc32" or "none".
        disk: A tier to use in place of files: any object with the methods of a LowerTier (docs/lower_tier.md). It
            is closed with the manager. Then none of the four arguments before this one is given.
        node_bytes: The most host memory of all managers of this job on this machine together, said as host_bytes
            is, which is then a part of it: who needs more takes it (docs/ranks.md). None is half of what there is
            where LOCAL_WORLD_SIZE is above 1 and host_bytes is "auto". Else nothing is shared.
        node_spill_bytes: The most that the files of all of them may take together.
        node_spill_write_budget: The most bytes that all of them may write together.
        transfer_stream: A stream of the device for the copies in both directions. None is two streams of its own,
            so that copies to the host and to the device run side by side.
        steps_in_flight: How many forwards, with their backwards, may have copies under way before the host waits.
            Each takes host memory of its own: with 2 one is computed while the next is queued.
        trace: Record when layers, copies, waits and file operations begin and end, and the bytes in each tier, for
            plot(), export_trace() and memory_summary(). It costs a few events for each layer, and about 40 MB: the
            last 100,000 records, and as many of files, are kept. memory_summary() counts all.
        hold_signals: Let the handlers of signals, Python's own for Ctrl-C among them, wait while the manager is
            in the middle of its bookkeeping. For that each handler is put behind one of the manager's until
            `close`. False leaves them alone, for Ray, notebooks and debuggers that watch over their own. The
            price: a KeyboardInterrupt, or what else a handler raises, may then come in the middle, and leave a
            manager that no longer answers or has lost host memory, or an optimizer's step half done. Make
            everything anew after it.
        recompute: Which layers may be computed again in backward, where a policy or a context wants it. "auto" is
            those whose values come out the same, bit by bit; "allow" is also others; False is none. policy="auto"
            wants it where that is faster than to move what they save.

    Raises:
        ValueError: Arguments cannot be right.
        DeviceUnavailable: This machine does not have the device.
        PinningFailed: Host memory cannot be had as asked.
        TierFull: Other managers of the machine leave less of what is shared than `preallocate` takes at once.
    """

    @uninterrupted
    def __init__(
        self,
        *,
        policy: Policy | str = "auto",
        device_budget: int | str | None = None,
        slowdown: float | None = None,
        device: str | torch.device | None = None,
        host_bytes: HostBytes = None,
        pin: bool | str = True,
        preallocate: bool | None = None,
        host_pool: HostPool | None = None,
        spill_dir: SpillDir | None = None,
        spill_bytes: int | str | None = None,
        spill_write_budget: int | str | None = None,
        spill_checksum: str | None = None,
        disk: LowerTier | None = None,
        node_bytes: HostBytes = None,
        node_spill_bytes: int | str | None = None,
        node_spill_write_budget: int | str | None = None,
        transfer_stream: torch.Stream | None = None,
        steps_in_flight: int = 2,
        trace: bool = False,
        hold_signals: bool = True,
        recompute: str | bool = "auto",
    ) -> None:
        yes_or_no("hold_signals", hold_signals)
        with contextlib.ExitStack() as undo:
            self._interrupts = Interrupts(hold=hold_signals)
            self._interrupts.watch()
            undo.callback(self._interrupts.close)
            choice = PolicyChoice(policy, device_budget, slowdown, recompute=recompute is not False)
            yes_or_no("trace", trace)
            if transfer_stream is not None:
                instance("transfer_stream", transfer_stream, torch.Stream)
            self.device = Device(device)
            node = NodeBudget(host_bytes, host_pool, node_bytes, node_spill_bytes, node_spill_write_budget)
            undo.callback(node.leave)
            self._disk = chosen_tier(spill_dir, spill_bytes, spill_write_budget, spill_checksum, disk, node)
            if self._disk is not None and disk is None:
                undo.callback(self._disk.close)
            self._host = host_tier(self.device, host_bytes, pin, preallocate, host_pool, steps_in_flight, node)
            undo.callback(self._host.drop)
            self._policy = choice.on(self.device, self._host.counted_on, self._disk)
            now = time.perf_counter if self._disk is None else self._disk.now
            levels = partial(_levels, self.device, self._host, self._disk)
            self._trace = Trace(self.device, now=now, levels=levels) if trace else None
            if self._trace is not None and self._disk is not None:
                self._disk.watch(self._trace.file_moved)
            stream = None if transfer_stream is None else self.device.generic(transfer_stream)
            self._engine = TransferEngine(self.device, stream, self._trace)
            self._counters = Counters()
            spiller = None if self._disk is None else Spiller(self._host, self._disk, self._counters)
            self._store = BlockStore(
                self.device,
                self._host,
                self._engine,
                self._policy,
                self._counters,
                spiller=spiller,
                trace=self._trace,
            )
            self._turn = Turn(self._store.drop, self._interrupts)
            self._phases = ModulePhases(self.device, self._host, self._engine, self._store.reserve)
            share = self._policy.states if isinstance(self._policy, PlannedPolicy) else None
            peak = DevicePeak(self.device)
            self._optimizers = RegisteredOptimizers(
                self.device, self._engine, self._host, self._disk, self._turn, peak, share
            )
            self._agreement = agreement = agreed(self._policy, node, self.device, self._turn, peak)
            self._activations = Activations(
                self._turn,
                self._policy,
                self._store,
                StepWatch(
                    self.device, peak, self._engine, self._store.blocks, self._turn, self._counters, self._trace
                ),
                spiller=spiller,
                trace=self._trace,
                before=(self._phases.free,) if share is None else (self._phases.free, self._optimizers.count),
                after=self._optimizers.poll,
                begins=None if agreement is None else agreement.forward_begins,
            )
            self._contexts = Contexts(
                self._activations,
                self._policy,
                self.device,
                None if self._disk is None else self._disk.stats().capacity,
                self._counters,
                self._interrupts,
                recompute,
            )
            # Saved tensors keep these, and not the manager.
            owned = (self._engine, self._host, self._disk, self._interrupts)
            weakref.finalize(self._activations, _abandon, *owned).atexit = False
            undo.pop_all()

    def offload_context(
        self,
        layers: Iterable[torch.nn.Module] | torch.nn.Module,
        *,
        min_bytes: int | str | None = None,
        recompute: How | None = None,
    ) -> OffloadContext:
        """A context for the forward: `with manager.offload_context(model.layers): loss = model(batch)`.

        Args:
            layers: The modules whose activations the policy may move. What other modules save stays on the device,
                except for a layer's inputs. Of a whole model its repeated blocks are taken, and what is saved
                before one of them begins is moved with it; a line of the log says which blocks.
            min_bytes: Smaller tensors stay on the device. None is 1 MiB, and with policy="auto" it falls by itself
                where smaller ones fill the device.
            recompute: The layers are computed again in backward. "full" keeps their inputs, "cheap" also the
                results of products, attention and convolutions; what is kept may move (docs/recompute.md).

        Raises:
            ValueError: The policy does not suit that many layers, a model's layers cannot be found, the disk
                tier is too small for any block, or the manager is to compute nothing again.
        """
        return self._contexts.of_layers(layers, min_bytes=min_bytes, recompute=recompute)

    @uninterrupted
    def attach(
        self,
        model: torch.nn.Module,
        *,
        layers: Iterable[torch.nn.Module] | None = None,
        min_bytes: int | str | None = None,
        recompute: How | None = None,
    ) -> Attachment:
        """From now on what the model's layers save moves, in each forward with gradients on, by any thread.

        The calls of the layers count, wherever they come from: the model, a method of it, or a wrapper.
        After `close` its forwards run as if it were not attached.
        torch.func's transforms, exports and copies of the model move nothing. A warning at the first backward says
        where no call of a layer was seen.

        Args:
            model: Is to be attached before it runs compiled.
            layers: Its layers. None is its repeated blocks, as with `offload_context(model)`.
            min_bytes: As for `offload_context`.
            recompute: As for `offload_context`.

        Returns:
            A handle, whose `remove()` ends that, and which keeps the model alive no more than this manager.

        Raises:
            ValueError: As `offload_context` does, and for a model that is attached already.
        """
        return self._contexts.attach(model, layers=layers, min_bytes=min_bytes, recompute=recompute)

    def layer_context(
        self, num_layers: int, *, min_bytes: int | str | None = None, variable_depth: bool = True
    ) -> LayerContext:
        """A context to be entered for each layer, where the loop over the layers is the user's own.

        Args:
            num_layers: How many layers one forward has. With several microbatches in flight: layers x microbatches.
            min_bytes: Smaller tensors stay on the device. None is 1 MiB, and with policy="auto" it falls by itself
                where smaller ones fill the device.
            variable_depth: A forward may have fewer layers. Say False for a pipeline, where the first layers may be
                through with their backward before the next ones begin.

        Raises:
            ValueError: The policy does not suit that many layers.
        """
        return self._contexts.of_loop(num_layers, min_bytes=min_bytes, variable_depth=variable_depth)

    @uninterrupted
    def register_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        bucket_bytes: int | str | None = None,
        residency: Residency = "host",
        separable: bool | None = None,
        overlap: Overlap | None = None,
        keep_gradients: bool = False,
    ) -> TieredOptimizer:
        """The optimizer to use from now on, in place of the one that is given: its states leave the device.

        Args:
            optimizer: Any. It may have states already. What states it will have is tried out with a copy of one
                parameter of each shape. Of a wrapper register the optimizer inside, and put the new one in its
                place.
            bucket_bytes: Half of the device memory that states pass through during a step; more where the state of
                one parameter alone is larger. None is 256 MiB; with a device budget of less than 8 GiB a 32nd of
                that.
            residency: Where the states rest between steps. "host" is pinned host memory. "disk" is the disk tier,
                by way of a few buckets of host memory. "device-until-offload" is the device, until `offload` is
                called. "auto" is the host, up to half of what is free there, and then the disk, if there is one;
                with policy="auto" as many stay on the device as make the step the shortest.
            separable: True says that a step does to each parameter what it would do if that were the only one. Then
                it is made bucket by bucket, after a trial. False is at once: all states come to the device for a
                step. None is bucket by bucket for torch's own optimizers but LBFGS, and at once for all others.
            overlap: What a step goes on beside. "backward" steps each bucket in the last backward of a step, as
                soon as its gradients are final, and frees these: the states come and leave beside computation.
                Nothing may look at gradients between backward and step, nor change a learning rate; before the last
                of several backwards `last_backward()` is to be called. "forward" has step() return at once, and
                steps each bucket beside the next forward, before its first use: whoever looks at a parameter, a
                gradient or a state before finds the new value. "auto" is "backward", unless the first step shows
                that it cannot be, and then "forward". None is in step() alone.
            keep_gradients: With overlap="backward", gradients stay until zero_grad, to be read.

        Returns:
            An optimizer with the same groups, and with the same results bit by bit.

        Raises:
            ValueError: The optimizer is registered, cannot be tiered, is not what `separable` says, or cannot have
                that overlap. Here, and in
                the cases below, it is as before.
            TierFull: There is no room for all states.
            torch.OutOfMemoryError: The device has none for a bucket.
            Closed: The manager is closed.
        """
        self._activations.check_open()
        if separable is not None:
            yes_or_no("separable", separable)
        return self._optimizers.register(
            optimizer,
            bucket_bytes=None if bucket_bytes is None else parse_bytes(bucket_bytes, "bucket_bytes"),
            residency=residency,
            separable=separable,
            overlap=overlap,
            keep_gradients=keep_gradients,
            owner=self,
        )

    @uninterrupted
    def offload(self, thing: torch.nn.Module | TieredOptimizer, *, gradients: bool = False) -> None:
        """Takes a module or the states of a tiered optimizer off the device until `reload`.

        They go to host memory, which is kept for the next time. Waits for the copies; then the device memory is
        free. What is away already, or on another device, stays where it is. A tensor of a module that is used
        meanwhile raises Offloaded. An optimizer can be stepped all the same.

        Args:
            thing: The module, of which the parameters and buffers go, or what `register_optimizer` returned.
            gradients: The gradients of a module go too.

        Raises:
            OffloadRefused: Others use the same memory, or a tensor cannot leave. Here, and in the cases below,
                nothing has moved.
            TierFull: The host tier has no room.
            Closed: The manager is closed.
            TypeError: The thing is neither.
        """
        if isinstance(thing, TieredOptimizer):
            thing.states.offload()
            return
        self._can_phase(thing)
        self._optimizers.finish()
        with self._turn:
            self._activations.check_open()
            self._activations.poll()
            self._phases.offload(thing, gradients=gradients, owner=self)

    @uninterrupted
    def reload(self, thing: torch.nn.Module | TieredOptimizer) -> None:
        """Brings back all that `offload` took, for work that is issued from now on.

        States whose residency is "host" or "disk" are where they belong, and stay there.

        The host does not wait for the copies, but the current stream does. Without an offload nothing happens.

        Args:
            thing: The module, or what `register_optimizer` returned.

        Raises:
            torch.OutOfMemoryError: The device has no room. Then all of it stays away.
            OffloadRefused: Another manager has it.
            TypeError: The thing is neither.
        """
        if isinstance(thing, TieredOptimizer):
            thing.states.reload()
            return
        self._can_phase(thing)
        self._optimizers.finish()
        with self._turn:
            self._activations.poll()
            self._phases.reload(thing)

    def away(
        self, *things: torch.nn.Module | TieredOptimizer, gradients: bool = False
    ) -> Absence[torch.nn.Module | TieredOptimizer]:
        """A context in which all of them are away: `with manager.away(model, optimizer): generate()`.

        It calls `offload` for each when it is entered, and `reload` when it is left, also by an error. If one
        cannot leave, those before it come back, and the context is not entered.

        Args:
            *things: Modules, and what `register_optimizer` returned.
            gradients: The gradients of modules go too.

        Raises:
            torch.OutOfMemoryError: When it is left, and the device has no room for all. Then all stay away.
        """
        return Absence(partial(self.offload, gradients=gradients), self.reload, things)

    def _can_phase(self, thing: object) -> None:
        if not isinstance(thing, torch.nn.Module):
            raise TypeError(
                "offload and reload take a torch.nn.Module, or what register_optimizer returned, not "
                f"{type(thing).__name__}"
            )

    @uninterrupted
    def stats(self) -> Stats:
        """Counters and sizes in bytes, under names such as "host.used.peak"."""
        self._optimizers.free()
        with self._turn:
            self._activations.poll()
            self._host.poll()
            disk = None if self._disk is None else self._disk.stats()
            blocks = self._store.blocks.by_key.values()
            stats = flatten(self._counters, self._host.pool_stats(), self._host.slots, blocks, disk)
            return stats | self._phases.stats() | self._host.shared_stats()

    @uninterrupted
    def memory_summary(self) -> str:
        """The stats as a table: what moved, with trace=True how much of it was hidden and who waited, and a plan's
        report.
        """
        told, report = summary(self._summary_rows()), self.report()
        return told if report.missing else f"{told}\n\n{report}"

    def log_to(self, writer: ScalarWriter, step: int | None = None) -> None:
        """Writes each number of `stats()` once, under a name such as "tiered_mem/host.used.peak".

        Args:
            writer: A SummaryWriter of TensorBoard, or anything with its `add_scalar`.
            step: The number that the writer is to put it at; None leaves that to the writer.
        """
        for name, value in self.stats().items():
            if not isinstance(value, str):
                writer.add_scalar(f"tiered_mem/{name}", value, step)

    def report(self) -> Report:
        """With policy="auto": what the plan promises, what came of it, and what would help. print() shows it.

        With other policies, and before the first step with a plan, it says what has moved and what is missing.
        Takes up to a second.
        """
        return plan_report(self._policy, self._counters)

    def export_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes what was recorded as a Chrome trace, which Perfetto opens, and `tiered-mem report` shows.

        Args:
            path: The file to write.

        Raises:
            RuntimeError: The manager was made without trace=True.
        """
        Path(path).write_text(json.dumps(self._chart()))

    def plot(self, path: str | os.PathLike[str], *, steps: int = 2) -> None:
        """Draws the last steps: memory of each tier and the budget, and below it layers, waits and copies.

        Args:
            path: The file to write, whose suffix is .png or .svg.
            steps: How many steps to draw. Without steps that can be told apart it is all that was recorded.

        Raises:
            RuntimeError: The manager was made without trace=True.
            ValueError: The suffix is another one, no layer was recorded, or `steps` is below 1.
            ImportError: matplotlib is missing: pip install 'tiered_mem[plot]'.
        """
        drawable(path)
        draw(Timeline.of(self._chart()).last(steps), path)

    @uninterrupted
    def _chart(self) -> dict[str, Any]:
        """What was recorded, as it is exported."""
        if self._trace is None:
            raise RuntimeError("nothing was recorded: make the manager with trace=True")
        about = self._about()
        with self._turn:
            return self._trace.chart(about)

    def _about(self) -> dict[str, Any]:
        """What the manager says in a trace's file beside the records."""
        report = self.report()
        return {
            "device budget bytes": report.budget,
            "summary": self._summary_rows(),
            "report": report.rows(),
            "advice": list(report.advice),
        }

    def _summary_rows(self) -> list[tuple[str, str]]:
        stats, overlap = self.stats(), [("overlap", "not measured: it takes trace=True")]
        if self._trace is not None:
            with self._turn:
                overlap = summary_rows(self._trace.figures())
        return stats_rows(str(self.device.torch_device), stats, overlap)

    @uninterrupted
    def synchronize(self) -> None:
        """Waits on the host for every copy and file operation that was started; takes back the slots they used."""
        self._optimizers.wait()
        with self._turn:
            self._engine.synchronize()
            self._store.wait()
            self._host.poll()

    @uninterrupted
    def close(self) -> None:
        """Waits for the copies under way and frees the host memory. Closing again does nothing.

        Activations that are still on the host are lost: a backward that needs them raises Closed. So are the states
        of tiered optimizers: take their state_dict() before. Modules that are offloaded come back to the device.
        What it has no room for stays on the host, outside of the host tier, and `reload` still brings it back.
        Where the runtime of the device does not take host memory back, its error is raised, and close may be called
        again.

        Raises:
            DeviceFailed: The device dropped copies after a failure.
        """
        with self._turn:
            self._activations.close()
        self._contexts.close()
        if self._agreement is not None:
            self._agreement.close()
        try:
            self._optimizers.close()
            with self._turn:
                for block in list(self._store.blocks.by_key.values()):
                    self._store.free(block)
                self._phases.close()
                self._engine.synchronize()
                self._store.wait()
        except DeviceFailed:
            # Host memory stays, as nobody knows what the device still does with it. Files can go.
            if self._disk is not None:
                self._disk.close()
            raise
        with self._turn:
            if self._disk is not None:
                self._disk.close()
            self._host.close()
        self._interrupts.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a TieringManager can be neither copied nor pickled: it owns host memory and streams. Make another "
            "one, or leave it out of what is copied"
        )

    def __enter__(self) -> TieringManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failure:  # the error on its way out matters more
            _log.error("the manager was not closed: %s", str(failure))

    def act(self, actions: Iterable[Action]) -> None:
        """Does what a policy could have answered. With ManualPolicy it is how blocks move at all.

        Args:
            actions: What to do, in this order.
        """
        self._activations.act(actions)


def _levels(device: Device, host: HostTier, disk: LowerTier | None) -> Levels:
    """The bytes in the tiers now. torch counts none for the cpu."""
    on_device = None if device.kind == "cpu" else device.memory()[0]
    return Levels(on_device, host.pool_stats().used, None if disk is None else disk.stats().used)


def _abandon(engine: TransferEngine, host: HostTier, disk: LowerTier | None, interrupts: Interrupts) -> None:
    """Whoever could still use a block has a reference to the manager, and there is none."""
    interrupts.close()
    engine.synchronize()
    if disk is not None:
        disk.close()
    host.drop()
