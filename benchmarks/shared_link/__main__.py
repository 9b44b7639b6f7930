"""What ranks do whose copies share the memory of one host.

    python -m benchmarks.shared_link --json shared_link.json

Layers of Llama 2 7B, at their real widths, sharded by FSDP2 over 2, 4 and 8 emulated NPUs, in dry runs on the
modelled clock of a 910B3: one sequence of 4096 tokens for each rank, and a budget of 70 % of what the plain step
takes. The host's memory is set so that the ranks have to share it. Each rank trains with policy="auto", which
measures the link and then sees what steps show of it; with a plan for the rates that a rank has beside the others;
and with one for the rates that it has alone. The last two are told, and keep to that whatever comes.

It ends with 1 where what is measured is more than 5 % from a rank's share after three steps, or a settled step
takes more than 3 % longer than one that was planned for the share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .links import MEASURED, PLAIN, SHARE, WAYS, WHOLE, shared

CHIP = "910b3"
BUDGET = 0.7  # of the plain step's peak
AFTER = 3  # steps, after which the rates are to be right
RATE_AT_MOST, STEP_AT_MOST = 0.05, 0.03
SETTLED = 3  # the last steps, of which one is the median


def main() -> int:
    options = parse()
    console = Console(highlight=False)
    found = {str(ranks): measured(ranks, options, console) for ranks in options.ranks}
    console.print(table_of(found))
    console.print("share, first, after 3: GB/s out and back; the others but off: seconds of a settled step")
    console.print("auto +, whole +: beyond one that was told the share")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return (
        0
        if all(each["rate off"] <= RATE_AT_MOST and each["beyond"] <= STEP_AT_MOST for each in found.values())
        else 1
    )


def measured(ranks: int, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """A row of the table. Rates in bytes a second, times in seconds, sizes in bytes."""
    plain = job(ranks, PLAIN, 3, 0, options)
    budget = int(BUDGET * plain["peaks"][-1])
    ways = {}
    for way in WAYS:
        console.print(f"{ranks} ranks, {way}")
        ways[way] = job(ranks, way, options.steps, budget, options)
    steps = {way: statistics.median(each["seconds"][-SETTLED:]) for way, each in ways.items()}
    links, share = ways[MEASURED]["links"], shared(ranks, options.host_memory)
    return {
        "host memory": options.host_memory,
        "layers": options.layers,
        "tokens": options.tokens,
        "budget": budget,
        "share": share,
        "first": links[0],
        "after three steps": links[AFTER],
        "rate off": max(abs(links[AFTER][way] / share[way] - 1) for way in ("out", "back")),
        "plain": statistics.median(plain["seconds"][1:]),
        **steps,
        "beyond": steps[MEASURED] / steps[SHARE] - 1,
        "beyond, whole link": steps[WHOLE] / steps[SHARE] - 1,
        "peaks": {way: max(each["peaks"][1:]) for way, each in ways.items()},
        "seconds": {way: each["seconds"] for way, each in ways.items()},
        "report": ways[MEASURED]["report"],
    }


def job(ranks: int, way: str, steps: int, budget: int, options: argparse.Namespace) -> dict[str, Any]:
    """What the first rank has found. Raises CalledProcessError where one of them fails."""
    emulator = ("--devices", str(ranks), "--clock", CHIP, "--dry", "--hbm", "512GiB", "--host", "512GiB")
    numbers = (steps, options.layers, options.tokens, budget, options.host_memory)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ascend_emulator", *emulator, "--host-memory", str(options.host_memory)),
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *("-m", "benchmarks.shared_link.child", way, *map(str, numbers)),
        ],
        # torch_npu's watchdog drops tensors when it looks, each second of this machine's time.
        env=os.environ
        | {"TORCH_HCCL_ASYNC_ERROR_HANDLING": "0", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        done.check_returncode()
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def table_of(found: dict[str, dict[str, Any]]) -> Table:
    table = Table("ranks", padding=0)
    for column in ("share", "first", "after 3", "off", "plain", "auto", "share", "auto +", "whole", "whole +"):
        table.add_column(column, justify="right")
    for ranks, row in found.items():
        table.add_row(
            ranks,
            *(f"{row[link]['out'] / 1e9:.1f}/{row[link]['back'] / 1e9:.1f}" for link in ("share", "first")),
            f"{row['after three steps']['out'] / 1e9:.1f}/{row['after three steps']['back'] / 1e9:.1f}",
            f"{row['rate off']:.1%}",
            *(f"{row[way]:.3f}" for way in (PLAIN, MEASURED, SHARE)),
            f"{row['beyond']:+.1%}",
            f"{row[WHOLE]:.3f}",
            f"{row['beyond, whole link']:+.1%}",
        )
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--layers", type=int, default=8, help="of Llama 2 7B, which has 32")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--host-memory", type=int, default=40_000_000_000, help="its rate, in bytes a second")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
