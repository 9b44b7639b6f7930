"""policy="auto" beside torch's checkpoint within the same budget, in this machine's own time.

    python -m ascend_emulator --h2d 1GB/s --d2h 1GB/s -m benchmarks.recompute.seconds
    python -m benchmarks.recompute.seconds --llama --width 4096 --context 4096 --batch 4 --host-bytes 32GiB

The demo's GPT, or blocks of Llama's, train within a share of what the plain step takes. "best" is torch's
checkpoint, whole or selective, around as few of the first layers as keep the budget. All go on with one model and
one optimizer, in rounds in which each makes a step; nobody always follows the same one. The learning rate is 0, so
that all gradients have to be the plain step's, bit for bit.

Exits with 1 where gradients are wrong, or auto passes its budget. Times are told and not judged.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.checkpointing import Kept, checkpointed
from benchmarks.peak import Peak
from examples.devices import emulated, find_device
from tiered_mem import TieringManager

from .checked_step import GptStep, LlamaStep, add_options

MIB = 1 << 20
SIZES = ("layers", "width", "context", "batch")
SETTLED = 15  # steps after which policy="auto" has its plan and goes by it


def main() -> int:
    options = parse()
    kind = find_device("-m benchmarks.recompute.seconds")
    console = Console(width=None if sys.stdout.isatty() else 100)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS need not repeat itself
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs time, and nothing here reads such memory
    training = Training(kind, options)
    budget = int(options.budget * training.plain_peak)
    with ExitStack() as stack:
        contenders = list(everyone(training, budget, kind, options, stack, console))
        for each in contenders:
            for _ in range(each.settled):
                each.step(training)
            each.seconds.clear()
        for number in track(range(options.rounds), "rounds", console=console):
            turn = number % len(contenders)
            for each in contenders[turn:] + contenders[:turn]:
                each.step(training)
    console.print(table(contenders, budget))
    auto, fastest = compared(contenders, budget)
    ratio = statistics.median(map(float.__truediv__, auto.seconds, fastest.seconds))
    console.print(f"auto over {fastest.name}, the fastest of the others within the budget: {ratio:.3f}")
    device = getattr(torch, kind).get_device_name()
    console.print(f"device: {device}{emulated()}; medians of {options.rounds} rounds")
    if options.json is not None:
        rows = [asdict(each, dict_factory=_figures) for each in contenders]
        sizes = {name: getattr(options, name) for name in ("llama", *SIZES)}
        result = {"device": device, "emulated": bool(emulated()), **sizes, "budget": budget, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if auto.peak <= budget and all(each.right for each in contenders) else 1


class Training:
    """The model and AdamW, whose states are on the device.

    plain_peak: bytes of a plain step.
    """

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        self._device = getattr(torch, kind)
        sizes = {name: getattr(options, name) for name in SIZES}
        self.checked = LlamaStep(kind, **sizes) if options.llama else GptStep(kind, **sizes)
        self._optimizer = torch.optim.AdamW(self.checked.model.parameters(), lr=0.0)
        self.run(contextlib.nullcontext())
        self.checked.remember()
        self.plain_peak = self.run(contextlib.nullcontext())[1]

    def run(self, context: AbstractContextManager[object]) -> tuple[float, int]:
        """Seconds from an idle device to an idle device, and the peak in bytes."""
        self._optimizer.zero_grad()
        gc.collect()
        gc.disable()
        try:
            self._device.synchronize()
            peak = Peak(self._device)
            began = time.perf_counter()
            with context:
                loss = self.checked.forward()
            loss.backward()
            self._optimizer.step()
            self._device.synchronize()
            return time.perf_counter() - began, peak.read()
        finally:
            gc.enable()


@dataclass
class Contender:
    """around: makes what to put around a forward. settled: steps before those that count.

    peak: in bytes, of all its steps.
    """

    name: str
    around: Callable[[], AbstractContextManager[object]]
    settled: int = 1
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    right: bool = True

    def step(self, training: Training) -> None:
        seconds, peak = training.run(self.around())
        self.seconds.append(seconds)
        self.peak = max(self.peak, peak)
        self.right = self.right and training.checked.is_right()


def everyone(
    training: Training, budget: int, kind: str, options: argparse.Namespace, stack: ExitStack, console: Console
) -> Iterator[Contender]:
    layers = list(training.checked.model.layers)
    yield Contender("plain", contextlib.nullcontext)
    for name, recompute in (("auto", "auto"), ("auto, moving only", False)):
        manager = TieringManager(
            policy="auto",
            device=kind,
            device_budget=budget,
            host_bytes=options.host_bytes,
            preallocate=False,
            recompute=recompute,
        )
        context = stack.enter_context(manager).offload_context(training.checked.model)
        yield Contender(name, lambda context=context: context, SETTLED)
    yield Contender("checkpoint, all", lambda: checkpointed(layers, "full"))
    kinds: tuple[tuple[str, Kept], ...] = (("checkpoint", "full"), ("selective", "selective"))
    for name, kept in kinds:
        if (k := fewest(training, kept, budget)) is None:
            console.print(f"{name}: not even all layers keep the budget")
        else:
            yield Contender(f"{name}, best: first {k}", lambda k=k, kept=kept: checkpointed(layers[:k], kept))


def fewest(training: Training, kept: Kept, budget: int) -> int | None:
    """How many of the first layers have to be checkpointed for the budget; None where all are not enough."""
    layers = list(training.checked.model.layers)
    for k in range(1, len(layers) + 1):
        if training.run(checkpointed(layers[:k], kept))[1] <= budget:
            return k
    return None


def compared(contenders: list[Contender], budget: int) -> tuple[Contender, Contender]:
    """auto, and the fastest of the others within the budget. Without any, that is the plain step."""
    plain, auto, *others = contenders
    within = [each for each in others if each.peak <= budget]
    return auto, min(within, key=lambda each: statistics.median(each.seconds), default=plain)


def table(contenders: list[Contender], budget: int) -> Table:
    result = Table(title=f"budget {budget / MIB:.0f} MiB", box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    result.add_column("", no_wrap=True)
    for column in ("step ms", "over plain", "peak MiB", "in budget", "gradients"):
        result.add_column(column, justify="right", no_wrap=True)
    plain = contenders[0]
    for each in contenders:
        ratio = statistics.median(map(float.__truediv__, each.seconds, plain.seconds))
        result.add_row(
            each.name,
            f"{1e3 * statistics.median(each.seconds):.0f}",
            f"{ratio:.3f}",
            f"{each.peak / MIB:.1f}",
            "yes" if each.peak <= budget else "no",
            "bit-equal" if each.right else "WRONG",
        )
    return result


def _figures(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in fields if name != "around"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, width=192, context=256, batch=8)
    parser.add_argument("--llama", action="store_true", help="blocks of Llama's in bfloat16 in place of the GPT")
    parser.add_argument("--budget", type=float, default=0.6, help="as a share of the plain step's peak")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--host-bytes", default="2GiB")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
