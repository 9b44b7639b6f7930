"""What it costs the host to have layers computed again in backward, for each operator that they run.

    python -m ascend_emulator -m benchmarks.recompute.host_time

A GPT so small that the host is what a step waits for. All layers are treated, and nothing moves. CPU time is the
calling thread's until forward and backward have returned, less what the plain step took in the same round; backward
is run on the calling thread for its sake. The rounds go through all in turn.

forward, backward and both are for each operator in the forward of the layers. again is how many operators a layer
runs in backward that it does not in a plain one, each for as long as one of a plain forward. What is left of both
is overhead, for each operator in the forward and again: that is what the target is for.

"cheap, all blocks" makes each result that is kept a block, however small; "cheap" only those of 1 MiB and more, of
which there are none here. "no recompute" is the context around the layers alone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.checkpointing import checkpointed
from examples.devices import emulated, find_device
from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy
from tiered_mem.policies.actions import How

from .checked_step import GptStep, add_options

TARGET = 25  # us


def main() -> int:
    options = parse()
    kind = find_device("-m benchmarks.recompute.host_time")
    console = Console(width=None if sys.stdout.isatty() else 100)
    training = Training(kind, options)
    counts = training.counts()
    with ExitStack() as stack:
        contenders = list(everyone(training, kind, stack))
        for each in contenders:
            for _ in range(options.layers + 2):  # in each step one layer has its trial
                each.step(training)
            each.taken.clear()
            each.backward_operators = training.backward_operators(each.around())
        gc.freeze()  # what is imported would make each gc.collect() slow
        for number in track(range(options.rounds), "rounds", console=console):
            turn = number % len(contenders)  # nobody always follows the same one
            for each in contenders[turn:] + contenders[:turn]:
                each.step(training)
    rows = [row(each, contenders[0], counts) for each in contenders]
    console.print(table(rows, plain_us(contenders[0], counts), counts, options.layers))
    device = getattr(torch, kind).get_device_name()
    console.print(f"device: {device}{emulated()}; medians of {options.rounds} rounds; the target is {TARGET} us")
    if options.json is not None:
        result = {"device": device, "emulated": bool(emulated()), **counts._asdict(), "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(each.right for each in contenders) else 1


class Taken(NamedTuple):
    """Seconds: of the CPU until the calls had returned, and until the device was idle."""

    forward: float
    backward: float
    step: float


class Counts(NamedTuple):
    """Operators of a plain forward: those of all layers, and with those outside of them."""

    layers: int
    forward: int


class Training:
    """Forward and backward of the GPT."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        self._device = getattr(torch, kind)
        sizes = {name: getattr(options, name) for name in ("layers", "width", "context", "batch")}
        self.gpt = GptStep(kind, **sizes)
        self.run(contextlib.nullcontext())
        self.gpt.remember()

    def run(self, context: AbstractContextManager[object]) -> Taken:
        self.gpt.model.zero_grad()
        gc.collect()
        gc.disable()
        try:
            self._device.synchronize()
            began, cpu = time.perf_counter(), [time.thread_time()]
            with context:
                loss = self.gpt.forward()
            cpu.append(time.thread_time())
            with torch.autograd.set_multithreading_enabled(False):
                loss.backward()
            cpu.append(time.thread_time())
            self._device.synchronize()
            return Taken(cpu[1] - cpu[0], cpu[2] - cpu[1], time.perf_counter() - began)
        finally:
            gc.enable()

    def counts(self) -> Counts:
        with Operators() as all_of_them:
            self.gpt.forward()
        layers, self.gpt.model.layers = self.gpt.model.layers, torch.nn.ModuleList()
        try:
            with Operators() as outside:
                self.gpt.forward()
        finally:
            self.gpt.model.layers = layers
        return Counts(all_of_them.count - outside.count, all_of_them.count)

    def backward_operators(self, context: AbstractContextManager[object]) -> int:
        """With what is computed again."""
        with context:
            loss = self.gpt.forward()
        with Operators() as counted, torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        return counted.count


class Operators(TorchDispatchMode):
    """Counts them, as a dispatch mode sees them. Not detach(), which hooks call and models hardly do."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is not torch.ops.aten.detach.default
        return func(*args, **(kwargs or {}))


@dataclass
class Contender:
    """around: makes what to put around a forward."""

    name: str
    around: Callable[[], AbstractContextManager[object]]
    taken: list[Taken] = field(default_factory=list)
    backward_operators: int = 0
    right: bool = True

    def step(self, training: Training) -> None:
        self.taken.append(training.run(self.around()))
        self.right = self.right and training.gpt.is_right()


def everyone(training: Training, kind: str, stack: ExitStack) -> Iterator[Contender]:
    layers = list(training.gpt.model.layers)

    def tiered(how: How | None, min_bytes: int) -> Callable[[], AbstractContextManager[object]]:
        policy = LayerOrderPolicy(0)
        manager = TieringManager(policy=policy, device=kind, host_bytes="64MiB", preallocate=False)
        stack.enter_context(manager)
        context = manager.offload_context(layers, min_bytes=min_bytes, recompute=how)
        return lambda: context

    yield Contender("plain", contextlib.nullcontext)
    yield Contender("no recompute", tiered(None, 1 << 20))
    yield Contender("cheap", tiered("cheap", 1 << 20))
    yield Contender("cheap, all blocks", tiered("cheap", 1))
    yield Contender("torch's selective checkpoint", lambda: checkpointed(layers, "selective"))
    yield Contender("full", tiered("full", 1 << 20))
    yield Contender("torch's checkpoint", lambda: checkpointed(layers, "full"))


def row(contender: Contender, plain: Contender, counts: Counts) -> dict[str, Any]:
    pairs = list(zip(contender.taken, plain.taken, strict=True))
    again = contender.backward_operators - plain.backward_operators

    def us(of: Callable[[Taken], float]) -> float:
        return 1e6 * statistics.median(of(ours) - of(theirs) for ours, theirs in pairs) / counts.layers

    both = us(lambda taken: taken.forward + taken.backward)
    operators_own = again * plain_us(plain, counts)
    return {
        "name": contender.name,
        "forward_us": us(lambda taken: taken.forward),
        "backward_us": us(lambda taken: taken.backward),
        "both_us": both,
        "again": again,
        "overhead_us": (both * counts.layers - operators_own) / (counts.layers + again),
        "step_ratio": statistics.median(ours.step / theirs.step for ours, theirs in pairs),
        "gradients": "bit-equal" if contender.right else "WRONG",
    }


def plain_us(plain: Contender, counts: Counts) -> float:
    """CPU time of an operator of the plain forward."""
    return 1e6 * statistics.median(each.forward for each in plain.taken) / counts.forward


def table(rows: list[dict[str, Any]], plain: float, counts: Counts, layers: int) -> Table:
    result = Table(
        title=f"{layers} layers of {counts.layers / layers:.0f} operators, {plain:.1f} us each in a plain forward",
        caption="us of CPU time",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    result.add_column("", no_wrap=True)
    for column in ("forward", "backward", "both", "again", "overhead", "step / plain", "gradients"):
        result.add_column(column, justify="right", no_wrap=True)
    for each in rows:
        cells = [f"{each[name]:.1f}" for name in ("forward_us", "backward_us", "both_us")]
        cells += [f"{each['again'] / layers:.0f}", f"{each['overhead_us']:.1f}"]
        result.add_row(each["name"], *cells, f"{each['step_ratio']:.2f}", each["gradients"])
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, width=64, context=32, batch=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
