"""What saved-tensor hooks that offload cost: ours beside torch's save_on_cpu and two published ones.

Host time is what a forward and a backward take until their calls return, less what the plain step takes in the
same round: pack and unpack together. A hook that waits for the device pays for it. CPU time is the calling thread's
in the same stretch, without such waits, and without what other threads take; backward is run on the calling thread
for its sake. Both are given for each tensor that autograd saves, and the CPU time once more for each that moves.
What stays is to be compared with hooks of two Python functions, which move nothing. The rounds go through all
contenders in turn.

tiered_mem takes part with two policies. Every activation is a block, unless the name says another size. Layer order
moves the first layers. "auto" has an ample budget, twice what the step needs, where nothing has to move. The other
two lie between what the plain step takes and what layer order needs to move all: half of the way down, and nine
tenths of it.

It is measured twice, with the sizes asked for and with a model so small that the host is what a step waits for. The
second one's steps are short, and there are five times as many rounds of them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from examples.devices import find_device
from examples.gpt import GPT, batches, standard_library
from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy, Policy

MIB = 1 << 20
HEAD = 32
SETTLED = 8  # steps after which policy="auto" plays its plan
# torchtune's calls torch.cuda by name; TRL's is made from it and knows other devices.
PEERS = {"torchtune": "torchtune.training._activation_offloading", "TRL": "trl.models.activation_offloading"}


def main() -> int:
    options = parse()
    kind = find_device("-m benchmarks.offload_hooks")
    console = Console()
    asked = Size(options.layers, options.width, options.context, options.batch)
    tables = []
    for name, size, rounds in (
        ("as asked", asked, options.rounds),
        ("host-bound", Size(options.layers, 64, 32, 2), 5 * options.rounds),
    ):
        saved, rows = compare(f"{name}: rounds", size, rounds, kind, options, console)
        console.print(table(name, size, saved, rows))
        for each in rows:
            remark = "WRONG gradients" if each.gradients == "WRONG" else each.remark
            if remark:
                console.print(f"{each.name}: {remark}", highlight=False)
        figures = [asdict(row) for row in rows]
        tables.append({"name": name, **asdict(size), "rounds": rounds, "saved_tensors": saved, "rows": figures})
    where = getattr(torch, kind).get_device_name()
    emulated = "ascend_emulator" in sys.modules
    console.print(f"device: {where}{', emulated' if emulated else ''}; medians of {options.rounds} rounds and more")
    if options.json is not None:
        result = {"device": where, "emulated": emulated, "tables": tables}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return any(row["gradients"] == "WRONG" for each in tables for row in each["rows"])


@dataclass(frozen=True)
class Size:
    """A GPT with heads of 32, and the data it is given."""

    layers: int
    width: int
    context: int
    batch: int


class Taken(NamedTuple):
    """What a step took.

    host, cpu: seconds until the calls had returned, and of them those in which the calling thread ran.
    step: seconds until the device was idle.
    peak: bytes of device memory, above what was allocated before.
    """

    host: float
    cpu: float
    step: float
    peak: int


@dataclass
class Contender:
    """Something to put around the forward, None if there is no such thing here, and what was measured with it.

    manager: whose plan there is to report of.
    """

    name: str
    context: Any
    remark: str = ""
    manager: TieringManager | None = None
    right: bool = True
    taken: list[Taken] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """The figures of a contender; None where it did not run, and the remark says why. report: of policy="auto"."""

    name: str
    gradients: str
    host_us_per_saved_tensor: float | None = None
    cpu_us_per_saved_tensor: float | None = None
    host_us_per_moved_tensor: float | None = None
    cpu_us_per_moved_tensor: float | None = None
    step_ratio: float | None = None
    peak_device_bytes: int | None = None
    tensors_moved: int | None = None
    bytes_moved: int | None = None
    remark: str = ""
    report: str = ""


def compare(
    title: str, size: Size, rounds: int, kind: str, options: argparse.Namespace, console: Console
) -> tuple[int, list[Row]]:
    """The number of tensors that autograd saves in a step, and a row for each contender."""
    step = Step(kind, size)
    with contextlib.ExitStack() as stack:
        everyone = list(contenders(step, kind, options, stack))
        saved = step.saved_tensors()
        moved = {each.name: copies for each in everyone if (copies := first_steps(each, step)) is not None}
        running = [each for each in everyone if each.name in moved]
        gc.freeze()  # what the peers' packages have imported would make each gc.collect() slow
        for number in track(range(options.warmup + rounds), title, console=console):
            turn = number % len(running)  # nobody always follows the same one
            for each in running[turn:] + running[:turn]:
                taken = step.run(each.context)
                each.right = each.right and step.is_right()
                if number >= options.warmup:
                    each.taken.append(taken)
    plain = everyone[0]
    return saved, [row(each, plain, saved, moved.get(each.name)) for each in everyone]


def contenders(
    step: Step, kind: str, options: argparse.Namespace, stack: contextlib.ExitStack
) -> Iterator[Contender]:
    yield Contender("plain", contextlib.nullcontext())
    # What a tensor costs that stays. Without detach() an operation that saves its own output would own itself.
    stays = saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
    yield Contender("two functions", stays)

    def tiered(name: str, policy: Policy | str, min_bytes: int = 1, budget: int | None = None) -> Contender:
        # Seven of them with all of their memory at once are too much for a small machine.
        host = {"host_bytes": options.host_bytes, "preallocate": False}
        manager = stack.enter_context(TieringManager(policy=policy, device=kind, device_budget=budget, **host))
        context = manager.offload_context(step.model.layers, min_bytes=min_bytes)
        return Contender(name, context, manager=None if budget is None else manager)

    yield tiered("layer order, none", LayerOrderPolicy(0))
    for name, min_bytes in (("layer order, 1 MiB", MIB), ("layer order, all", 1)):
        all_move = tiered(name, LayerOrderPolicy(options.offload, in_flight=options.in_flight), min_bytes)
        yield all_move
    step.run(all_move.context)
    before, plain = step.plain
    least = step.run(all_move.context).peak
    for name, peak in (("ample", 2 * plain), ("half", (plain + least) // 2), ("tight", (plain + 9 * least) // 10)):
        yield tiered(f"auto, {name}", "auto", budget=before + peak)
    yield Contender("save_on_cpu, pinned", save_on_cpu(pin_memory=True, device_type=kind))
    for package, module in PEERS.items():
        for streams in (True, False):
            name = f"{package}{'' if streams else ', no streams'}"
            try:
                if package == "TRL":
                    importlib.import_module("accelerate").PartialState()  # it logs by that
                peer = importlib.import_module(module).OffloadActivations(use_streams=streams)
                if hasattr(peer, "update_model_params"):
                    peer.update_model_params(step.model)
            except Exception as error:  # whatever a package that is not ours does not like here
                yield Contender(name, None, in_short(error))
            else:
                yield Contender(name, peer, lend_use_count(kind) if package == "TRL" and streams else "")


def lend_use_count(kind: str) -> str:
    """TRL looks for this function of torch's in torch_npu. The remark to make where torch_npu has no such one."""
    if kind != "npu":
        return ""
    module, torchs = importlib.import_module("torch_npu")._C, torch._C._storage_Use_Count
    if getattr(module, "_storage_Use_Count", torchs) is not torchs:
        return ""
    module._storage_Use_Count = torchs
    return "runs with torch._C._storage_Use_Count, which it looks for in torch_npu._C and does not find there"


def first_steps(contender: Contender, step: Step) -> CopiesToHost | None:
    """Counts what the contender moves in a step. None if it cannot run one: then the remark says why."""
    if contender.context is None:
        return None
    copies = CopiesToHost()
    try:
        for _ in range(SETTLED):
            step.run(contender.context)
        with copies:
            step.run(contender.context)
    except Exception as error:  # as above
        contender.remark = in_short(error)
        return None
    return copies


def in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:100]


def row(contender: Contender, plain: Contender, saved: int, copies: CopiesToHost | None) -> Row:
    if copies is None:
        return Row(contender.name, "not run", remark=contender.remark)
    pairs = list(zip(contender.taken, plain.taken, strict=True))
    host = statistics.median(ours.host - theirs.host for ours, theirs in pairs) * 1e6
    cpu = statistics.median(ours.cpu - theirs.cpu for ours, theirs in pairs) * 1e6
    return Row(
        contender.name,
        "bit-equal" if contender.right else "WRONG",
        host_us_per_saved_tensor=host / saved,
        cpu_us_per_saved_tensor=cpu / saved,
        host_us_per_moved_tensor=host / copies.count if copies.count else None,
        cpu_us_per_moved_tensor=cpu / copies.count if copies.count else None,
        step_ratio=statistics.median(ours.step / theirs.step for ours, theirs in pairs),
        peak_device_bytes=max(taken.peak for taken in contender.taken),
        tensors_moved=copies.count,
        bytes_moved=copies.nbytes,
        remark=contender.remark,
        report="" if contender.manager is None else str(contender.manager.report()),
    )


class Step:
    """Forward and backward of the example's GPT, the same data each time."""

    def __init__(self, kind: str, size: Size) -> None:
        self._device = getattr(torch, kind)
        torch.manual_seed(0)
        heads = size.width // HEAD
        self.model = GPT(layers=size.layers, width=size.width, heads=heads, context=size.context).to(kind)
        data = batches(standard_library(), batch=size.batch, context=size.context, seed=0)
        self._tokens, self._targets = (part.to(kind) for part in next(data))
        self.run(contextlib.nullcontext())
        self._right = [weight.grad for weight in self.model.parameters()]
        peak = self.run(contextlib.nullcontext()).peak
        self.model.zero_grad()
        # What is allocated before a plain step, and at most beyond that in it.
        self.plain = self._device.memory_allocated(), peak

    def run(self, context: Any) -> Taken:
        self.model.zero_grad()
        gc.collect()
        gc.disable()
        try:
            self._device.synchronize()
            self._device.reset_peak_memory_stats()
            before = self._device.memory_allocated()
            began, cpu = time.perf_counter(), time.thread_time()
            with context:
                loss = self.model(self._tokens, self._targets)
            with torch.autograd.set_multithreading_enabled(False):
                loss.backward()
            returned, cpu = time.perf_counter(), time.thread_time() - cpu
            self._device.synchronize()
            ended = time.perf_counter()
        finally:
            gc.enable()
        return Taken(returned - began, cpu, ended - began, self._device.max_memory_allocated() - before)

    def is_right(self) -> bool:
        """Whether the last run's gradients are, bit for bit, those of the first plain one."""
        found = [weight.grad for weight in self.model.parameters()]
        return all(torch.equal(some, right) for some, right in zip(found, self._right, strict=True))

    def saved_tensors(self) -> int:
        """How many tensors autograd saves in a forward."""
        count = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            return tensor

        self.run(saved_tensors_hooks(pack, lambda tensor: tensor))
        return count


class CopiesToHost(TorchDispatchMode):
    """Counts the copies from the device to the host that torch makes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        match func.overloadpacket:
            case torch.ops.aten.copy_:
                self._note(args[0], args[1])
            case torch.ops.aten._to_copy:
                self._note(result, args[0])
            case torch.ops.aten._foreach_copy_:
                for destination, source in zip(args[0], args[1], strict=True):
                    self._note(destination, source)
        return result

    def _note(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if destination.device.type == "cpu" and source.device.type != "cpu":
            self.count += 1
            self.nbytes += destination.nbytes


def table(name: str, size: Size, saved: int, rows: list[Row]) -> Table:
    sizes = ", ".join(f"{what} {number}" for what, number in asdict(size).items())
    result = Table(
        title=f"{name}: {sizes}; {saved} saved tensors",
        caption="us: beyond the plain step, for each saved tensor or each moved one",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),  # to go into 80 columns
        pad_edge=False,
    )
    result.add_column("hooks", no_wrap=True)
    for column in ("host\nus", "CPU\nus", "CPU us,\nmoved", "step /\nplain", "peak\nMiB", "moved", "moved\nMiB"):
        result.add_column(column, justify="right")
    for each in rows:
        figures = (
            (each.host_us_per_saved_tensor, ".1f", 1),
            (each.cpu_us_per_saved_tensor, ".1f", 1),
            (each.cpu_us_per_moved_tensor, ".1f", 1),
            (each.step_ratio, ".3f", 1),
            (each.peak_device_bytes, ".1f", MIB),
            (each.tensors_moved, "d", 1),
            (each.bytes_moved, ".1f", MIB),
        )
        cells = [
            "" if value is None else f"{value if unit == 1 else value / unit:{form}}"
            for value, form, unit in figures
        ]
        result.add_row(each.name, *cells)
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=192, help=f"a multiple of {HEAD}")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--offload", type=int, help="layers that tiered_mem offloads; all, as the others, by default"
    )
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2, help="rounds that do not count")
    parser.add_argument("--host-bytes", default="2GiB")
    parser.add_argument("--peers", type=Path, help="a folder with packages to compare with: torchtune, trl")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if options.width % HEAD:
        parser.error(f"--width must be a multiple of {HEAD}")
    if options.peers is not None:
        sys.path.append(str(options.peers))
    return options


if __name__ == "__main__":
    sys.exit(main())
