"""How long a whole training step takes whose optimizer's states come and leave beside forward and backward.

    python -m ascend_emulator -m benchmarks.overlapped_step --json overlapped.json

The example's GPT with AdamW, whose states in fp32 are 8 bytes for each parameter in each direction: on the device;
and in host memory or on a drive, with each `overlap` that register_optimizer knows, and without. The emulated link
is set so that backward takes --backward times as long as the states of one direction do: all could move beside it.
What a step takes beyond one with its states on the device is told over that time of the link, or over the drive's
where that is longer. Without an overlap it is about all of it.

Kernels and copies of the emulated device share this machine's processors and its memory; kernels are given one
processor, so that the copies find another. What copies cost that nobody waits for is measured too: a training with
its states on the device issues as many bytes in both directions when a step begins, and one more has as many read
from the drive and written to it besides, by a thread of its own. Where others work here too, they measure these.

In each round everyone takes some steps in a row, in an order that is another each time, and ends when all that they
began has. A step is that time over their number; beyond is what it takes more than the plain one of the same round.
What is told are medians. The first round, in which states are made, does not count. With overlap="forward" the last
step of a round has no forward beside it: what waits then is stepped as the round ends, and nothing hides it. All
start from the same parameters and have the same data, and have to end with the same parameters, to the last bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import Parameter

from benchmarks.optimizer_contestants import STATE_BYTES, Copies, Drive
from benchmarks.optimizer_step import manager_for, set_link
from benchmarks.overlaps import OVERLAPS
from benchmarks.turns import Spent, measure, median
from examples.devices import emulated, find_device
from examples.gpt import GPT, batches, standard_library
from tiered_mem import TieringManager
from tiered_mem.optimizer.registered import Overlap, Residency
from tiered_mem.sizes import format_bytes, parse_bytes

WITH_NONE: tuple[Overlap | None, ...] = (None, *OVERLAPS)

# With an overlap, what a step may take beyond the plain one: of the link's time with the states in host memory, and
# of the link's time or the drive's, whichever is longer, with the states on the drive.
HOST_AT_MOST, DISK_AT_MOST = 0.15, 0.3

HEAD = 64
PLAIN = "on the device"
BESIDE = "with copies beside"
DRIVE_BESIDE = "with copies and drive beside"


def main() -> None:
    options = parse()
    kind = find_device("-m benchmarks.overlapped_step")
    device = getattr(torch, kind)
    console = Console(highlight=False)
    if emulated():
        torch.set_num_threads(options.threads)
    data = [part.to(kind) for part in next(texts(options))]
    plain = Training(PLAIN, model_for(kind, options), data)
    nbytes = STATE_BYTES * sum(parameter.numel() for parameter in plain.parameters)
    backward_s = plain.backward_s(device)
    link = set_link(round(options.backward * nbytes / backward_s))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir, prefix="benchmark-")))
        copies = Copies(kind, nbytes, options.bucket // 2)
        drive = stack.enter_context(Drive.below(folder, nbytes, options.bucket // 2))
        trainings = [plain, Beside(BESIDE, copies, model_for(kind, options), data)]
        if "disk" in options.residency:
            trainings.append(BesideDrive(copies, drive, model_for(kind, options), data))
        for residency, overlap in asked(options):
            manager = stack.enter_context(manager_for(residency, kind, nbytes, options.bucket, folder))
            tiered = Tiering(manager, residency, overlap, options.bucket)
            trainings.append(Training(tiered.name, model_for(kind, options), data, tiered))
        busy_before = os.getloadavg()[0]
        spent = measure(
            [*trainings, copies, drive], device, rounds=options.rounds, steps=options.steps, seed=options.seed
        )
        found = Found(
            spent,
            link_s=nbytes / link if link else median(spent[copies.name]),
            drive_s=median(spent[drive.name]),
            backward_s=backward_s,
        )
        equal = all(
            torch.equal(mine, theirs)
            for each in trainings
            for mine, theirs in zip(each.parameters, plain.parameters, strict=True)
        )
    console.print(
        f"{device.get_device_name()}{emulated()}: GPT, {nbytes / STATE_BYTES / 1e6:.0f}M parameters, "
        f"{options.batch} x {options.context} tokens; AdamW, fused, {format_bytes(nbytes)} of states, "
        f"bucket_bytes {format_bytes(options.bucket)}; {options.rounds} rounds of {options.steps} steps, "
        f"{os.cpu_count()} processors; load {busy_before:.1f} before and {os.getloadavg()[0]:.1f} after"
    )
    show(found, console)
    console.print(f"parameters {'are' if equal else 'ARE NOT'} the same to the last bit")
    if options.json is not None:
        options.json.write_text(json.dumps(figures(found, nbytes, equal), indent=1) + "\n")


class Training:
    """Forward, backward and step, of a model of its own and the same data each time.

    tiering: what its states are registered with; None leaves them on the device.
    """

    def __init__(self, name: str, model: GPT, data: Sequence[torch.Tensor], tiering: Tiering | None = None) -> None:
        self.name = name
        self.parameters: Sequence[Parameter] = list(model.parameters())
        self._model = model
        self._data = data
        self._manager = None if tiering is None else tiering.manager
        optimizer = torch.optim.AdamW(self.parameters, fused=True)
        self._optimizer = optimizer if tiering is None else tiering.registered(optimizer)

    def step(self) -> None:
        self._model(*self._data).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def wait(self) -> None:
        if self._manager is not None:
            self._manager.synchronize()

    def backward_s(self, device: Any, times: int = 4) -> float:
        """The least seconds that a backward takes alone, as others here make it longer. Nothing is stepped."""
        taken = []
        for _ in range(times):
            loss = self._model(*self._data)
            device.synchronize()
            began = time.perf_counter()
            loss.backward()
            device.synchronize()
            taken.append(time.perf_counter() - began)
            self._optimizer.zero_grad()
        return min(taken)


class Beside(Training):
    """States stay on the device, and copies run beside each step of which it needs none."""

    def __init__(self, name: str, copies: Copies, model: GPT, data: Sequence[torch.Tensor]) -> None:
        super().__init__(name, model, data)
        self._copies = copies

    def step(self) -> None:
        self._copies.step()
        super().step()


class BesideDrive(Beside):
    """The same, and a drive is read and written beside each step, one step's after the other's."""

    def __init__(self, copies: Copies, drive: Drive, model: GPT, data: Sequence[torch.Tensor]) -> None:
        super().__init__(DRIVE_BESIDE, copies, model, data)
        self._drive = drive
        self._pool = ThreadPoolExecutor(1)
        self._under_way: list[Future[None]] = []

    def step(self) -> None:
        self._under_way.append(self._pool.submit(self._drive.step))
        super().step()

    def wait(self) -> None:
        for each in self._under_way:
            each.result()
        self._under_way.clear()
        self._drive.wait()


@dataclass(frozen=True)
class Tiering:
    """How an optimizer's states are moved."""

    manager: TieringManager
    residency: Residency
    overlap: Overlap | None
    bucket_bytes: int

    @property
    def name(self) -> str:
        return name_of(self.residency, self.overlap)

    def registered(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return self.manager.register_optimizer(
            optimizer, residency=self.residency, overlap=self.overlap, bucket_bytes=self.bucket_bytes
        )


@dataclass(frozen=True)
class Found:
    """spent: by the contestant's name. link_s, drive_s: what the bytes of one direction take alone."""

    spent: dict[str, list[Spent]]
    link_s: float
    drive_s: float
    backward_s: float

    @property
    def slower_s(self) -> float:
        return max(self.link_s, self.drive_s)

    @property
    def at_most(self) -> dict[str, float]:
        """The seconds that a step may take beyond the plain one, by the training's name."""
        seconds = {"host": HOST_AT_MOST * self.link_s, "disk": DISK_AT_MOST * self.slower_s}
        return {name_of(residency, overlap): most for residency, most in seconds.items() for overlap in OVERLAPS}

    def beyond(self, name: str) -> float:
        """The seconds that a step takes beyond the plain one of the same round."""
        pairs = zip(self.spent[name], self.spent[PLAIN], strict=True)
        return statistics.median(mine.wall - plain.wall for mine, plain in pairs)

    def memory(self, name: str) -> int:
        """The most that a step takes of the device, above what it finds there."""
        return max(each.memory for each in self.spent[name])


def name_of(residency: str, overlap: str | None) -> str:
    return residency if overlap is None else f"{residency}, {overlap}"


def asked(options: argparse.Namespace) -> Iterator[tuple[Residency, Overlap | None]]:
    """The residencies and overlaps to measure."""
    for residency in options.residency:
        for overlap in WITH_NONE:
            if str(overlap).lower() in options.overlap:
                yield residency, overlap


def model_for(kind: str, options: argparse.Namespace) -> GPT:
    """The same parameters each time."""
    torch.manual_seed(options.seed)
    return GPT(layers=options.layers, width=options.width, heads=options.width // HEAD, context=options.context).to(
        kind
    )


def texts(options: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return batches(standard_library(), batch=options.batch, context=options.context, seed=options.seed)


def show(found: Found, console: Console) -> None:
    table = Table("states, overlap", padding=0)
    for column in ("ms", "least-most", "beyond", "at most", "x link", "x slower", "memory"):
        table.add_column(column, justify="right")
    table.add_row("backward alone", ms(found.backward_s))
    table.add_row("link", ms(found.link_s))
    for name, spent in found.spent.items():
        walls = [each.wall for each in spent]
        row = [name, ms(median(spent)), f"{ms(min(walls))}-{ms(max(walls))}"]
        if name not in (Copies.name, Drive.name, PLAIN):
            beyond = found.beyond(name)
            row += [ms(beyond), ms(found.at_most[name]) if name in found.at_most else ""]
            row += [f"{beyond / found.link_s:.2f}", f"{beyond / found.slower_s:.2f}"]
        elif name == PLAIN:
            row += [""] * 4
        if name not in (Copies.name, Drive.name):
            row.append(format_bytes(found.memory(name)))
        table.add_row(*row)
    console.print(table)
    console.print("beyond: ms of a whole step beyond those of the one with its states on the device")
    console.print("x link, x slower: that over the link's time, and over the longer of link's and drive's")
    console.print("memory: of the device, the most above parameters, and states that rest there")


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def figures(found: Found, nbytes: int, equal: bool) -> dict[str, object]:
    result: dict[str, object] = {
        "bytes in one direction": nbytes,
        "link (s)": found.link_s,
        "drive (s)": found.drive_s,
        "backward alone (s)": found.backward_s,
        "parameters equal": equal,
    }
    for name, spent in found.spent.items():
        if name in (Copies.name, Drive.name):
            continue
        result[f"{name} (s)"] = median(spent)
        result[f"{name}, device memory (bytes)"] = found.memory(name)
        if name == PLAIN:
            continue
        result[f"{name}, beyond plain (s)"] = found.beyond(name)
        result[f"{name}, beyond plain, over the link's time"] = found.beyond(name) / found.link_s
        result[f"{name}, beyond plain, over the slower of link and drive"] = found.beyond(name) / found.slower_s
        if name in found.at_most:
            result[f"{name}, beyond plain at most (s)"] = found.at_most[name]
    return result


def parse() -> argparse.Namespace:
    overlaps = [str(overlap).lower() for overlap in WITH_NONE]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="of the example's GPT")
    parser.add_argument("--width", type=int, default=512, help=f"a multiple of {HEAD}")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--bucket", type=parse_bytes, default=16 << 20, help="bucket_bytes, such as 64MiB")
    parser.add_argument("--residency", nargs="+", choices=["host", "disk"], default=["host", "disk"])
    parser.add_argument("--overlap", nargs="+", choices=overlaps, default=overlaps)
    parser.add_argument("--backward", type=float, default=3, help="over the time of the emulated link")
    parser.add_argument("--threads", type=int, default=1, help="processors for the emulated device's kernels")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the drive to measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="in each round, in a row")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, data and order")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
