"""How much longer a training step takes with activations offloaded, beside the plain step in the same run.

On the emulated NPU the link is set so that all copies of a step together take half of its compute time. Real
hardware has the link it has.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.report import report
from examples.devices import find_device
from examples.gpt import GPT, batches, standard_library
from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy


def main() -> None:
    options = parse()
    kind = find_device("-m benchmarks.offload_overhead")
    console = Console()
    step = Step(kind, options)
    policy = LayerOrderPolicy(options.offload, in_flight=options.in_flight)
    with TieringManager(policy=policy, device=kind, host_bytes="4GiB") as manager:
        offload = manager.offload_context(step.model.layers)
        step.run(contextlib.nullcontext())
        compute = step.run(contextlib.nullcontext())
        copied = moved(manager)
        step.run(offload)
        copied = moved(manager) - copied
        rate = set_link(copied / (options.copy_share * compute))

        plain, tiered = [], []
        for _ in track(range(options.repeats), "pairs of steps", console=console):
            plain.append(step.run(contextlib.nullcontext()))
            tiered.append(step.run(offload))
        stats = manager.stats()
    result = {
        "device": getattr(torch, kind).get_device_name(),
        "emulated": "ascend_emulator" in sys.modules,
        "layers": options.layers,
        "offloaded_layers": options.offload,
        "in_flight": options.in_flight,
        "bytes_copied_per_step": copied,
        "link_bytes_per_s": rate,
        "plain_step_s": statistics.median(plain),
        "tiered_step_s": statistics.median(tiered),
        "ratio": statistics.median(t / p for t, p in zip(tiered, plain, strict=True)),
        "reloads_on_demand": stats["reloads_on_demand.total"],
    }
    report(result, console, options.json)


class Step:
    """One training step of the example's GPT, the same data each time."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        self._device = getattr(torch, kind)
        torch.manual_seed(0)
        self.model = GPT(layers=options.layers, width=options.width, heads=6, context=options.context).to(kind)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        data = batches(standard_library(), batch=options.batch, context=options.context, seed=0)
        self._tokens, self._targets = (part.to(kind) for part in next(data))

    def run(self, context: Any) -> float:
        """Seconds from an idle device to an idle device."""
        self._device.synchronize()
        began = time.perf_counter()
        with context:
            loss = self.model(self._tokens, self._targets)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._device.synchronize()
        return time.perf_counter() - began


def moved(manager: TieringManager) -> int:
    """Bytes copied so far, both directions together."""
    stats = manager.stats()
    return int(stats["offloaded.bytes.total"]) + int(stats["reloaded.bytes.total"])


def set_link(bytes_per_s: float) -> int | None:
    """Sets the emulated link, both directions, and returns the rate; None on hardware."""
    emulator = sys.modules.get("ascend_emulator")
    if emulator is None:
        return None
    rate = int(bytes_per_s)
    emulator.configure(h2d_bytes_per_s=rate, d2h_bytes_per_s=rate)
    return rate


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--offload", type=int, default=4)
    parser.add_argument("--in-flight", type=int, default=0)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--copy-share", type=float, default=0.5, help="time of all copies / compute time")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
