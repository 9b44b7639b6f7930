"""Two models in the memory of one: a GPT that is trained, and another that generates while the first is away.

As in reinforcement learning a round has two phases. First the generator writes bytes; then the learner is trained
on the text and on what was written, by AdamW, whose states come and go with it. The rounds run three times from one
seed: with ample device memory and both models there, with a budget for one of them, which ends in OutOfMemoryError,
and with that budget and the model that rests offloaded. Losses and bytes of the first and the last are equal.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import screen  # says what is missing, before torch does
import torch
from gpt import GPT, batches, standard_library
from rich.console import Console
from rich.table import Table
from training import same

from tiered_mem import TieringManager

MIB = 1 << 20


@dataclass
class Run:
    """What came out; of each phase the name, the peak in it and what was left on the device; host memory; time."""

    name: str
    losses: list[float] = field(default_factory=list)
    written: list[torch.Tensor] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    phases: list[tuple[str, int, int]] = field(default_factory=list)
    host: int = 0
    seconds: float = 0.0
    out_of_memory: bool = False

    @property
    def peak(self) -> int:
        return max((peak for _, peak, _ in self.phases), default=0)


def main() -> int:
    options = parse()
    shown = screen.Screen("examples/rl_phases.py")
    console, kind = shown.console, shown.kind
    ample = run("both there", options, kind, console)
    budget = int(ample.peak * options.budget)
    getattr(torch, kind).set_per_process_memory_fraction(budget / shown.total)
    without = run("both there, budget", options, kind, console)
    phased = run("phases, budget", options, kind, console, host_bytes=options.host_bytes)

    if phased.out_of_memory:
        console.print("the budget is too small even for one of them")
        return 1
    console.print(table(ample, phased, budget))
    equal = ample.losses == phased.losses and same(ample.weights, phased.weights)
    equal = equal and all(torch.equal(one, other) for one, other in zip(ample.written, phased.written, strict=True))
    overhead = 100 * (phased.seconds / ample.seconds - 1)
    shown.overhead(
        f"{overhead:+.1f} %: both models and the states come and go once in each round, and nothing hides that"
    )
    if not without.out_of_memory:
        console.print("both models fitted into the budget: there was nothing to show")
    shown.verdict("losses, weights and written bytes are bit-equal with and without offloading", right=equal)
    return 0 if equal and without.out_of_memory else 1


def run(name: str, options: argparse.Namespace, kind: str, console: Console, *, host_bytes: str = "") -> Run:
    """All rounds; without host_bytes nothing is offloaded."""
    result = Run(name)
    device = getattr(torch, kind)
    torch.manual_seed(options.seed)
    with contextlib.ExitStack() as stack:
        manager = None
        if host_bytes:
            manager = stack.enter_context(TieringManager(policy="lru", device=kind, host_bytes=host_bytes))
        try:
            began = time.perf_counter()
            rounds(result, options, kind, manager)
            result.seconds = time.perf_counter() - began
        except torch.OutOfMemoryError as error:
            result.out_of_memory = True
            console.print(f"{name}: torch.OutOfMemoryError: {error}")
        if manager is not None:
            result.host = int(manager.stats()["host.used.peak"])
    gc.collect()
    device.empty_cache()
    return result


def rounds(result: Run, options: argparse.Namespace, kind: str, manager: TieringManager | None) -> None:
    data = batches(standard_library(), batch=options.batch, context=options.context, seed=options.seed)
    learner = GPT(layers=options.layers, width=options.width, heads=options.heads, context=options.context)
    learner = learner.to(kind)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-3)
    if manager is not None:
        optimizer = manager.register_optimizer(optimizer, residency="device-until-offload")
        manager.offload(learner)
    # In memory of its own: the generator is as large as the learner.
    generator = GPT(layers=options.layers, width=options.width, heads=options.heads, context=options.context)
    generator = generator.to(kind)

    for number in range(options.rounds):
        with phase(f"round {number}: generate", result, kind):
            if manager is not None:
                manager.reload(generator)
            tokens, _ = next(data)
            result.written.append(generate(generator, tokens[:, : options.prompt].to(kind), options.tokens).cpu())
            if manager is not None:
                manager.offload(generator)
        with phase(f"round {number}: train", result, kind):
            if manager is not None:
                manager.reload(learner)
                manager.reload(optimizer)
            written = (result.written[-1][:, :-1], result.written[-1][:, 1:])
            for inputs, targets in itertools.chain(itertools.islice(data, options.steps), [written]):
                loss = learner(inputs.to(kind), targets.to(kind))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                result.losses.append(loss.item())
                del loss
            if manager is not None:
                manager.offload(optimizer)
                manager.offload(learner)
    if manager is not None:
        manager.reload(learner)
    result.weights = {name: weight.cpu() for name, weight in learner.state_dict().items()}


@torch.no_grad()
def generate(model: GPT, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """The tokens, and the most probable ones after them, of shape (batch, prompt + count)."""
    for _ in range(count):
        x = model.tokens(tokens) + model.positions.weight[: tokens.shape[1]]
        for layer in model.layers:
            x = layer(x)
        following = model.head(model.norm(x[:, -1])).argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, following], dim=1)
    return tokens


@contextlib.contextmanager
def phase(name: str, result: Run, kind: str) -> Iterator[None]:
    device = getattr(torch, kind)
    device.reset_peak_memory_stats()
    yield
    result.phases.append((name, device.max_memory_allocated(), device.memory_allocated()))


def table(ample: Run, phased: Run, budget: int) -> Table:
    share = f"{100 * budget / ample.peak:.0f} % of the peak with both models there"
    caption = f"device memory in MiB; host memory for both models: {phased.host / MIB:.1f}"
    result = Table(title=f"budget {budget / MIB:.0f} MiB, {share}", caption=caption)
    result.add_column("phase")
    for column in ("both there, peak", "after", "phases, peak", "after"):
        result.add_column(column, justify="right")
    for (name, peak, after), (_, phased_peak, phased_after) in zip(ample.phases, phased.phases, strict=True):
        figures = (peak, after, phased_peak, phased_after)
        result.add_row(name, *(f"{nbytes / MIB:.1f}" for nbytes in figures))
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=16, help="bytes that a generation begins with")
    parser.add_argument("--tokens", type=int, default=16, help="bytes that it adds")
    parser.add_argument("--steps", type=int, default=2, help="steps on the text in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=0.9, help="device memory, as a share of the ample peak")
    parser.add_argument("--host-bytes", default="256MiB")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
