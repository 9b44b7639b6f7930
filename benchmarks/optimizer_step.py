"""How long an optimizer's step takes whose states rest in host memory or on a drive: in one run, beside its peers.

Each step moves all states to the device and back. Both directions run at once, so that a step can be as fast as the
bytes of one direction go over the link. Steps are compared with that, and with what the drive alone takes for them.
"Copies alone" shows how near that can be come to here.

    python -m ascend_emulator -m benchmarks.optimizer_step --json step.json

The states are AdamW's in fp32, 8 bytes for each parameter in each direction: 4 ns at the 2 GB/s that the emulated
link is set to, in both directions. The fused kernel takes about 1 ns on one processor, so that the link bounds a
step and not the computing; the first step, which moves nothing, tells whether that holds. With one kernel for each
operation it is 2 to 5 ns: see --foreach. Kernels and copies of the emulated device share this machine's processors;
kernels are given one of them, so that the copies find another. On hardware, the link's time is that of the copies
alone.

In each round everyone takes some steps in a row, in an order that is another each time; a step is that time over
their number. They end when all that they began has: also what is written to the drive, which otherwise would go on
behind them. What is told are medians. The first round, in which states are made and files are laid out, does not
count. All start from the same parameters, and have to end with the same, to the last bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import Parameter

from benchmarks.optimizer_contestants import STATE_BYTES, Contestant, Copies, Drive, OneByOne, Plain, Tiered
from benchmarks.turns import Spent, measure, median
from examples.devices import emulated, find_device
from examples.gpt import GPT
from tiered_mem import TieringManager
from tiered_mem.sizes import format_bytes, parse_bytes

# What a step may take: with the states in host memory, as a multiple of the link's time; with the states on the
# drive, of the link's time or the drive's, whichever is longer.
HOST_AT_MOST, DISK_AT_MOST = 1.15, 1.2


def main() -> None:
    options = parse()
    kind = find_device("-m benchmarks.optimizer_step")
    device = getattr(torch, kind)
    console = Console(highlight=False)
    if emulated():
        torch.set_num_threads(options.threads)
    shapes = shapes_of(options)
    nbytes = STATE_BYTES * sum(shape.numel() for shape in shapes)
    piece = options.bucket // 2
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir, prefix="benchmark-")))
        copies = Copies(kind, nbytes, piece)
        drive = stack.enter_context(Drive.below(folder, nbytes, piece))
        original, gradients = (randoms(shapes, kind, seed) for seed in (options.seed, options.seed + 1))
        plain = Plain(parameters(original, gradients), not options.foreach)
        one_by_one = OneByOne(parameters(original, gradients), not options.foreach)
        tiered = []
        for residency in options.residency:
            manager = stack.enter_context(manager_for(residency, kind, nbytes, options.bucket, folder))
            mine = parameters(original, gradients)
            tiered.append(Tiered(manager, residency, options.bucket, mine, not options.foreach))
        del original
        link = set_link(options.link)
        away: list[Contestant] = [*tiered, one_by_one]
        contestants = [plain, *away, copies, drive]
        busy_before = os.getloadavg()[0]
        spent = measure(contestants, device, rounds=options.rounds, steps=options.steps, seed=options.seed)
        found = Found(
            spent,
            link_s=nbytes / link if link else median(spent[copies.name]),
            drive_s=median(spent[drive.name]),
            memory_bound=2 * options.bucket + STATE_BYTES * max(shape.numel() for shape in shapes),
        )
        equal = all(
            torch.equal(mine, theirs)
            for each in away
            for mine, theirs in zip(each.parameters, plain.parameters, strict=True)
        )
    console.print(
        f"{device.get_device_name()}{emulated()}: AdamW, {'foreach' if options.foreach else 'fused'}, "
        f"{nbytes / STATE_BYTES / 1e6:.0f}M parameters, {len(shapes)} tensors, {format_bytes(nbytes)} of states, "
        f"bucket_bytes {format_bytes(options.bucket)}, {options.rounds} rounds, {os.cpu_count()} processors; "
        f"load {busy_before:.1f} before and {os.getloadavg()[0]:.1f} after"
    )
    show(found, console)
    console.print(f"parameters {'are' if equal else 'ARE NOT'} the same to the last bit")
    if options.json is not None:
        options.json.write_text(json.dumps(figures(found, nbytes, equal), indent=1) + "\n")


@dataclass(frozen=True)
class Found:
    """spent: by the contestant's name. link_s, drive_s: what the bytes of one direction take alone."""

    spent: dict[str, list[Spent]]
    link_s: float
    drive_s: float
    memory_bound: int

    @property
    def at_most(self) -> dict[str, float]:
        """The seconds that a step may take, by the contestant's name."""
        slower = max(self.link_s, self.drive_s)
        return {"tiered, host": HOST_AT_MOST * self.link_s, "tiered, disk": DISK_AT_MOST * slower}

    def memory(self, name: str) -> int:
        """The device memory of a step, above that of the plain one."""
        plain, mine = (max(each.memory for each in self.spent[who]) for who in (Plain.name, name))
        return mine - plain


def shapes_of(options: argparse.Namespace) -> list[torch.Size]:
    with torch.device("meta"):
        model = GPT(layers=options.layers, width=options.width, heads=1, context=options.width)
    return [parameter.shape for parameter in model.parameters()]


def randoms(shapes: Sequence[torch.Size], kind: str, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(kind) for shape in shapes]


def parameters(values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> list[Parameter]:
    """Parameters of their own, with gradients that all share."""
    made = [Parameter(value.clone()) for value in values]
    for parameter, gradient in zip(made, gradients, strict=True):
        parameter.grad = gradient
    return made


def manager_for(residency: str, kind: str, nbytes: int, bucket_bytes: int, folder: Path) -> TieringManager:
    if residency == "host":
        return TieringManager(policy="lru", device=kind, host_bytes=nbytes + 2 * bucket_bytes)
    return TieringManager(
        policy="lru", device=kind, host_bytes=5 * bucket_bytes, spill_dir=folder, spill_bytes=3 * nbytes
    )


def set_link(bytes_per_s: int) -> int | None:
    """Sets the emulated link, both directions, and returns the rate; None on hardware."""
    emulator = sys.modules.get("ascend_emulator")
    if emulator is None:
        return None
    emulator.configure(h2d_bytes_per_s=bytes_per_s, d2h_bytes_per_s=bytes_per_s)
    return bytes_per_s


def show(found: Found, console: Console) -> None:
    table = Table("step", "ms", "least-most", "at most", "CPU ms", "x link", "x slower", "memory", padding=0)
    slower = max(found.link_s, found.drive_s)
    table.add_row("link", f"{1e3 * found.link_s:.0f}")
    for name, spent in found.spent.items():
        seconds = median(spent)
        walls = [1e3 * each.wall for each in spent]
        table.add_row(
            name,
            f"{1e3 * seconds:.0f}",
            f"{min(walls):.0f}-{max(walls):.0f}",
            f"{1e3 * found.at_most[name]:.0f}" if name in found.at_most else "",
            f"{1e3 * statistics.median(each.cpu for each in spent):.0f}",
            f"{seconds / found.link_s:.2f}",
            f"{seconds / slower:.2f}",
            format_bytes(found.memory(name)) if name not in (Copies.name, Drive.name) else "",
        )
    console.print(table)
    console.print("x link, x slower: over the link's time, and over the longer of the link's and the drive's")
    most = format_bytes(found.memory_bound)
    console.print(
        f"memory: of the device, above the first step's; two buckets and the largest parameter's are {most}"
    )


def figures(found: Found, nbytes: int, equal: bool) -> dict[str, object]:
    result: dict[str, object] = {
        "bytes in one direction": nbytes,
        "link (s)": found.link_s,
        "memory bound (bytes)": found.memory_bound,
        "parameters equal": equal,
    }
    for name, spent in found.spent.items():
        result[f"{name} (s)"] = median(spent)
        result[f"{name}, CPU (s)"] = statistics.median(each.cpu for each in spent)
        result[f"{name}, over the link's time"] = median(spent) / found.link_s
        result[f"{name}, over the slower of link and drive"] = median(spent) / max(found.link_s, found.drive_s)
        if name not in (Copies.name, Drive.name):
            result[f"{name}, device memory above plain (bytes)"] = found.memory(name)
        if name in found.at_most:
            result[f"{name}, at most (s)"] = found.at_most[name]
    return result


def rate(text: str) -> int:
    return parse_bytes(text.removesuffix("/s"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="of the example's GPT")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--bucket", type=parse_bytes, default=64 << 20, help="bucket_bytes, such as 64MiB")
    parser.add_argument("--residency", nargs="+", choices=["host", "disk"], default=["host", "disk"])
    parser.add_argument("--foreach", action="store_true", help="AdamW of many kernels instead of the fused one")
    parser.add_argument("--link", type=rate, default="2GB/s", help="of the emulated device, each direction")
    parser.add_argument("--threads", type=int, default=1, help="processors for the emulated device's kernels")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the drive to measure")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="in each round, in a row")
    parser.add_argument("--seed", type=int, default=0, help="of the data and of the order")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
