"""A training step of Llama's blocks, plain and tiered: what it costs, what it saves, and that nothing else changes.

    python -m benchmarks.llama_step --device cuda --json llama.json

All runs start from the same weights and see the same data: plain; the activations of a quarter of the layers on
the host; those of all layers; these and the optimizer's states; and plain again, which tells whether this machine
repeats itself at all. Losses and weights of each run are compared with those of the first, bit for bit. Step times
are medians from an idle device to an idle device, without the first steps. Where copies take longer than computing,
as with all layers on a fast device, a step takes as long as the link: the shares of hidden copying tell.

By default the layers save about 2.5 GiB in bfloat16. --small is for a look at the program itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy
from tiered_mem.sizes import format_bytes

WARMUP = 2


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    hidden: int
    context: int
    batch: int
    host_bytes: str
    bucket_bytes: str


FULL = Size(8, 2048, 16, 5632, 2048, 2, "6GiB", "128MiB")
SMALL = Size(4, 128, 4, 352, 128, 2, "128MiB", "256KiB")


@dataclass(frozen=True)
class Run:
    """What was measured. Times are in seconds, sizes in bytes; None is what the cpu or a plain run does not have.

    hidden: the share of the copying that computing did not wait for. *_rate: bytes per second, while copies ran.
    """

    name: str
    step: float
    steps: list[float]
    device_peak: int | None
    losses: list[float]
    equal: bool
    host_peak: int | None = None
    copied_per_step: int | None = None
    offload_hidden: float | None = None
    reload_hidden: float | None = None
    offload_rate: float | None = None
    reload_rate: float | None = None
    reloads_on_demand: int | None = None


def main() -> int:
    options = parse()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs time, and nothing here reads such memory
    size = SMALL if options.small else FULL
    training = Training(options.device, size, options.steps)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        runs = [
            training.plain("plain"),
            training.tiered(f"activations of {size.layers // 4} of {size.layers}", size.layers // 4, states=False),
            training.tiered("activations", size.layers, states=False),
            training.tiered("activations and states", size.layers, states=True),
            training.plain("plain again"),
        ]
    show(runs)
    result = {
        "device": options.device,
        **asdict(size),
        "warnings": sorted({str(each.message).split("\n")[0] for each in warned}),
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "runs": [asdict(run) | {"over_plain": run.step / runs[0].step} for run in runs],
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(run.equal for run in runs) else 1


class Block(nn.Module):
    """A block of Llama's: attention with rotary positions, and a gated feed-forward network."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (batch, context, width). cos, sin: (context, width of a head)."""
        q, k, v = (
            self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        )
        attended = functional.scaled_dot_product_attention(
            turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True
        )
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        normed = self.feed_forward_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def rotary(context: int, depth: int, kind: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `turned`, each of shape (context, depth), where depth is the width of a head."""
    speeds = 10_000.0 ** -(torch.arange(0, depth, 2) / depth)
    angles = torch.outer(torch.arange(context), speeds).repeat(1, 2)
    return angles.cos().bfloat16().to(kind), angles.sin().bfloat16().to(kind)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Training:
    """Trains the same blocks from the same weights with the same data, again and again."""

    def __init__(self, kind: str, size: Size, steps: int) -> None:
        self._kind, self._size, self._steps = kind, size, steps
        self._device: Any = None if kind == "cpu" else getattr(torch, kind)
        self._turn = rotary(size.context, size.width // size.heads, kind)
        generator = torch.Generator().manual_seed(1)
        shape = (size.batch, size.context, size.width)
        self._x = torch.randn(shape, generator=generator).bfloat16().to(kind)
        self._first: tuple[list[float], list[Tensor]] | None = None

    def plain(self, name: str) -> Run:
        blocks, optimizer = self._start()
        return self._measured(name, blocks, optimizer, contextlib.nullcontext(), None)

    def tiered(self, name: str, layers: int, *, states: bool) -> Run:
        """layers: how many give up their activations. states: whether the optimizer's do their states."""
        blocks, optimizer = self._start()
        policy = LayerOrderPolicy(layers, in_flight=1 if layers > 1 else 0)
        with TieringManager(
            policy=policy, device=self._kind, host_bytes=self._size.host_bytes, trace=True
        ) as manager:
            if states:
                optimizer = manager.register_optimizer(
                    optimizer, bucket_bytes=self._size.bucket_bytes, residency="host"
                )
            offload = manager.offload_context(blocks, min_bytes=1 << 14)
            return self._measured(name, blocks, optimizer, offload, manager)

    def _start(self) -> tuple[nn.ModuleList, Any]:
        torch.manual_seed(0)
        blocks = nn.ModuleList(self._block() for _ in range(self._size.layers)).bfloat16().to(self._kind)
        return blocks, torch.optim.AdamW(blocks.parameters(), lr=1e-4, fused=self._kind != "npu")

    def _block(self) -> Block:
        return Block(self._size.width, self._size.heads, self._size.hidden)

    def _measured(
        self,
        name: str,
        blocks: nn.ModuleList,
        optimizer: Any,
        context: contextlib.AbstractContextManager[object],
        manager: TieringManager | None,
    ) -> Run:
        losses, seconds = [], []
        for number in range(WARMUP + self._steps):
            self._wait()
            if self._device is not None and number == WARMUP:
                self._device.reset_peak_memory_stats()
            began = time.perf_counter()
            with context:
                x = self._x
                for block in blocks:
                    x = block(x, *self._turn)
                loss = x.float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self._wait()
            seconds.append(time.perf_counter() - began)
            losses.append(loss.item())
            del x, loss
        peak = None if self._device is None else self._device.max_memory_allocated()
        equal = self._as_at_first(losses, blocks)
        timed = seconds[WARMUP:]
        run = Run(name, statistics.median(timed), timed, peak, losses, equal)
        return run if manager is None else self._with_copies(run, manager)

    def _with_copies(self, run: Run, manager: TieringManager) -> Run:
        assert manager._trace is not None
        stats, figures = manager.stats(), manager._trace.figures()
        moved = int(stats["offloaded.bytes.total"]) + int(stats["reloaded.bytes.total"])
        return Run(
            **asdict(run)
            | {
                "host_peak": int(stats["host.used.peak"]),
                "copied_per_step": moved // (WARMUP + self._steps),
                "offload_hidden": figures.offload.hidden,
                "reload_hidden": figures.reload.hidden,
                "offload_rate": rate(figures.offload.nbytes, figures.offload.seconds),
                "reload_rate": rate(figures.reload.nbytes, figures.reload.seconds),
                "reloads_on_demand": int(stats["reloads_on_demand.total"]),
            }
        )

    def _as_at_first(self, losses: list[float], blocks: nn.ModuleList) -> bool:
        weights = [weight.detach().cpu() for weight in blocks.parameters()]
        if self._first is None:
            self._first = losses, weights
        first, others = self._first
        return losses == first and all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))

    def _wait(self) -> None:
        if self._device is not None:
            self._device.synchronize()


def rate(nbytes: int, seconds: float) -> float | None:
    return nbytes / seconds if seconds > 0 else None


def show(runs: Sequence[Run]) -> None:
    print(f"{'run':<24} {'step ms':>9} {'x plain':>8} {'device':>11} {'host':>11} {'hidden':>11}  same bits")
    for run in runs:
        hidden = "/".join(
            "-" if share is None else f"{100 * share:.0f} %" for share in (run.offload_hidden, run.reload_hidden)
        )
        sizes = ("-" if size is None else format_bytes(size) for size in (run.device_peak, run.host_peak))
        device, host = sizes
        print(
            f"{run.name:<24} {1e3 * run.step:>9.1f} {run.step / runs[0].step:>8.3f} {device:>11} {host:>11} "
            f"{hidden:>11}  {'yes' if run.equal else 'NO'}"
        )
    print("hidden: of the copies to the host, and back")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "npu", "cpu"], required=True)
    parser.add_argument("--steps", type=int, default=6, help=f"in each run, after {WARMUP} that do not count")
    parser.add_argument("--small", action="store_true", help="blocks of a few MiB")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
