"""A training run of the examples' GPT: its loop, and what is measured of it."""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from gpt import GPT, batches, standard_library
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

MIB = 1 << 20


@dataclass
class Run:
    """resident: bytes that are on the device between two steps. peak_disk: bytes in spill files."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    resident: int = 0
    peak_device: int = 0
    peak_host: int = 0
    peak_disk: int = 0
    out_of_memory: str | None = None

    @property
    def step(self) -> float:
        """Seconds of a step; the first one, in which memory is first touched, does not count."""
        return statistics.median(self.seconds[1:] or self.seconds)

    def equals(self, other: Run) -> bool:
        """Whether losses and weights are the same to the bit."""
        return self.losses == other.losses and same(self.weights, other.weights)


class Training:
    """Trains GPTs from one seed.

    options: of the command line, see `add_options`. kind: the device, "npu" or "cuda".
    """

    def __init__(self, options: argparse.Namespace, kind: str, console: Console) -> None:
        self._options = options
        self._console = console
        self.kind = kind

    def measure(self, name: str, body: Callable[[Run], None]) -> Run:
        """Calls the body with a new run, and measures it, also if it ends in torch.OutOfMemoryError."""
        run = Run(name)
        device = getattr(torch, self.kind)
        device.reset_peak_memory_stats()
        try:
            body(run)
        except torch.OutOfMemoryError as error:
            run.out_of_memory = str(error).split(".")[0]
            self._console.print(f"{name}: torch.OutOfMemoryError: {error}")
        run.peak_device = device.max_memory_allocated()
        gc.collect()
        device.empty_cache()
        return run

    def model(self) -> GPT:
        options = self._options
        torch.manual_seed(options.seed)
        return GPT(layers=options.layers, width=options.width, heads=options.heads, context=options.context).to(
            self.kind
        )

    def optimizer(self, model: GPT) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def plain(self, run: Run) -> None:
        """The run without tiering."""
        model = self.model()
        self.steps(run, model, self.optimizer(model))

    def steps(
        self,
        run: Run,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        *,
        offload: contextlib.AbstractContextManager[object] | None = None,
        after_forward: Callable[[], None] | None = None,
    ) -> None:
        """Makes all steps.

        offload: the context around each forward. after_forward: called in the first step.
        """
        options = self._options
        data = batches(standard_library(), batch=options.batch, context=options.context, seed=options.seed)
        for tokens, targets in self._track(itertools.islice(data, options.steps), run):
            began = time.perf_counter()
            with offload or contextlib.nullcontext():
                loss = model(tokens.to(self.kind), targets.to(self.kind))
            if after_forward is not None and not run.losses:
                after_forward()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(loss.item())
            run.seconds.append(time.perf_counter() - began)
            del loss
        run.weights = {key: weight.cpu() for key, weight in model.state_dict().items()}
        run.resident = getattr(torch, self.kind).memory_allocated()

    def _track(self, data: Iterable[Any], run: Run) -> Iterator[Any]:
        """The batches, with a progress bar that shows the loss."""
        columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("loss {task.fields[loss]}"), console=self._console) as progress:
            task = progress.add_task(run.name, total=self._options.steps, loss="")
            for item in data:
                yield item
                progress.update(task, advance=1, loss=f"{run.losses[-1]:.4f}")


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def add_options(parser: argparse.ArgumentParser, *, width: int, context: int, batch: int, steps: int) -> None:
    """The options of a training, with these defaults."""
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=width)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=context)
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
