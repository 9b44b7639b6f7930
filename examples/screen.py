"""What the examples print: the device, a table of runs, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from devices import accelerator, emulated, find_device
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from training import Run

MIB = 1 << 20


class Screen:
    """The standard output of an example.

    script: its file, such as "examples/train_gpt.py". Ends the process where this machine has no device for it.

    kind: the device, "npu" or "cuda". total: its memory in bytes.
    """

    def __init__(self, script: str) -> None:
        self.console = Console()
        self.kind = find_device(script)
        device = accelerator(self.kind)
        self.total: int = device.mem_get_info()[1]
        self.console.print(f"device: {device.get_device_name()}{emulated()}, {self.total / MIB:,.0f} MiB")
        if self.kind == "npu":
            self.console.print(
                r"Lines that begin with 'Warning:', '\[W' or 'E' are torch_npu's own words, and no fault."
            )

    def table(self, runs: Sequence[Run], title: str = "") -> None:
        """The runs beside the first of them, which has all the memory that it wants."""
        plain = runs[0]
        disk = any(run.peak_disk for run in runs)
        places = "device, host and disk" if disk else "device and host"
        table = Table(title=title or None, caption=f"{places}: peak MiB", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        columns = ["run", "first loss", "last loss", "device", "host", *["disk"] * disk, "step ms", "overhead"]
        for column in columns:
            table.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
        for run in runs:
            sizes = [f"{size / MIB:.0f}" for size in (run.peak_device, run.peak_host, run.peak_disk)][: 2 + disk]
            if run.out_of_memory:
                table.add_row(run.name, "out of", "memory", sizes[0])
                continue
            overhead = "" if run is plain else f"{100 * (run.step / plain.step - 1):+.0f} %"
            losses = f"{run.losses[0]:.6f}", f"{run.losses[-1]:.6f}"
            table.add_row(run.name, *losses, *sizes, f"{1000 * run.step:.0f}", overhead)
        self.console.print(table)

    def overhead(self, why: str) -> None:
        """What the overhead comes from."""
        self.console.print(f"overhead: {why}")

    def verdict(self, what: str, *, right: bool) -> None:
        """The last word."""
        self.console.print(f"{what}: {'yes' if right else 'NO'}", style="bold green" if right else "bold red")
