"""Plans the training of Llama 2 on an NPU, on a machine that has neither the NPU nor the memory.

It makes steps of the training in a dry run of the emulated NPU: torch, torch_npu and tiered_mem run as ever, memory
is counted, and kernels and copies take their modelled time, but nothing is computed. First without tiering. Then
the optimizer's states rest on the host, and the activations of more and more layers go there, until the rest fits.

    python examples/plan_7b.py
    python examples/plan_7b.py --model 13b --tokens 32768
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import ascend_emulator
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}; from a clone of the repository: pip install ./emulator '.[examples]'")

sys.path.insert(0, str(Path(__file__).parent))
if TYPE_CHECKING:
    from plan import Planned

GIB = 1 << 30
MODELS = ("7b", "13b")


def main() -> int:
    options = parse()
    os.environ["TIERED_MEM_HOST_LIMIT"] = options.host  # what the modelled server has, and not this machine
    ascend_emulator.start(hbm_bytes=options.hbm, host_bytes=options.host, clock=options.chip, dry=True)
    from llama import SHAPES  # these import torch, which must find the device
    from plan import Plan

    console = Console()
    shape = SHAPES[options.model]
    console.print(f"Llama 2 {options.model}, bfloat16, AdamW, {options.batch} x {options.tokens} tokens")
    console.print(f"modelled: a {options.chip} with {options.hbm}, a host with {options.host}")
    plan = Plan(shape, batch=options.batch, tokens=options.tokens, host_bytes=options.host)
    plans = [plan.plain()]
    for layers in range(0, shape.layers + 1, options.stride):
        if plans[-1].out_of_memory is None:
            break
        plans.append(plan.tiered(layers))
    for each in plans:
        if each.out_of_memory:
            console.print(f"{each.name}: torch.OutOfMemoryError: {each.out_of_memory}")
    console.print(table(plans))
    wall, rss = time.perf_counter() - STARTED, peak_memory() / GIB
    console.print(
        f"{len(plans)} trainings were planned in {wall:.0f} s, with {rss:.1f} GiB of this machine's memory"
    )
    return 0 if plans[-1].out_of_memory is None else 1


def table(plans: list[Planned]) -> Table:
    result = Table(
        caption="peaks in GiB; modelled seconds of a step, its kernels, and its copies", padding=(0, 1, 0, 0)
    )
    for column in ("training", "device", "host", "step", "kernels", "copies", "hidden"):
        result.add_column(column, justify="left" if column == "training" else "right", no_wrap=True)
    for each in plans:
        row = [each.name, f"{each.peak_device / GIB:.1f}", f"{each.peak_host / GIB:.1f}"]
        if each.out_of_memory:
            result.add_row(*row, "out of", "memory", "", "")
            continue
        times = (f"{seconds:.2f}" for seconds in (each.step, each.compute, each.copies))
        result.add_row(*row, *times, f"{each.hidden / each.copies:.0%}" if each.copies else "")
    return result


def peak_memory() -> int:
    """The most bytes that this process had in memory. getrusage() would count those of the one that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", choices=MODELS, default="7b")
    parser.add_argument("--tokens", type=int, default=8192, help="of a sequence")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--chip", default="910b3", help="a name or file, as --clock of ascend_emulator takes it")
    parser.add_argument("--hbm", default="64GiB", help="the device's memory")
    parser.add_argument("--host", default="512GiB", help="the host memory that can be pinned")
    parser.add_argument("--stride", type=int, default=4, help="by how many layers more leave with each try")
    return parser.parse_args()


STARTED = time.perf_counter()
if __name__ == "__main__":
    sys.exit(main())
