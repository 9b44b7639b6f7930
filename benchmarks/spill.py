"""How fast the disk tier writes and reads beside fio, safetensors and DeepSpeed: in one run, on one file system.

In each round every contestant writes the same number of bytes and reads them back, one after the other, in an
order that is another each time. The first round, in which files are laid out and memory is touched, does not count;
from then on fio, DeepSpeed and the disk tier write over files that are there. What is told are medians. The memory
of fio and DeepSpeed is of small pages: where the disk tier is faster, that may be due to the slab's huge ones.

    TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -m benchmarks.spill --dir /mnt/nvme

With several directories, one on each drive, the disk tier is measured over all of them, too: `--dir /nvme0 /nvme1`.
The peers, and the disk tier on one drive, are on the first.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.spill_peers import SAFETENSORS, TIER, Contestant, Safetensors, Spent, Tier, deepspeed, fio
from tiered_mem.allocators import PageableMemory, Region, SlabPool
from tiered_mem.sizes import format_bytes, parse_bytes
from tiered_mem.spill.filesystem import filesystem_of
from tiered_mem.tiers.host_tier import bytes_of

# What the disk tier has to reach, as a multiple of the best of fio and of safetensors.
DEMANDED = {("fio", "write"): 0.9, ("fio", "read"): 0.9, (SAFETENSORS, "write"): 3.0, (SAFETENSORS, "read"): 2.0}
DIRECTIONS = ("write", "read")


def main() -> None:
    options = parse()
    console = Console(highlight=False)
    count = max(1, options.bytes // options.record)
    with contextlib.ExitStack() as stack:
        folders = [
            Path(stack.enter_context(tempfile.TemporaryDirectory(dir=path, prefix="benchmark-")))
            for path in options.dir
        ]
        folder = folders[0]
        source, slots = (stack.enter_context(memory(count, options.record)) for _ in range(2))
        fill(source, options.seed)
        contestants: list[Contestant] = [
            *(
                stack.enter_context(contextlib.closing(Tier(places, source, slots, options.checksum)))
                for places in ([folder], folders)[: len(folders)]
            ),
            Safetensors(folder, source),
            *fio(folder, count * options.record, console),
            *deepspeed(folder, source, console),
        ]
        spent = measure(contestants, options.rounds, Random(options.seed))
    nbytes = count * options.record
    console.print(
        f"{filesystem_of(options.dir[0]).name}, {format_bytes(nbytes)} a round in {count} records, "
        f"{options.rounds} rounds, {os.cpu_count()} processors"
    )
    show(spent, nbytes, console)
    if options.json is not None:
        options.json.write_text(json.dumps(figures(spent, nbytes), indent=1) + "\n")


@contextlib.contextmanager
def memory(count: int, nbytes: int) -> Iterator[list[Region]]:
    """Regions of a slab of ordinary pages, which are touched."""
    source = PageableMemory()
    with SlabPool(source, count * nbytes) as pool:
        pool.preallocate(count * nbytes)
        regions = [pool.allocate(nbytes) for _ in range(count)]
        for region in regions:
            bytes_of(region).zero_()
        try:
            yield regions
        finally:
            for region in regions:
                pool.deallocate(region)


def fill(regions: Sequence[Region], seed: int) -> None:
    """With what no file system can compress."""
    generator = torch.Generator().manual_seed(seed)
    for region in regions:
        bytes_of(region).random_(generator=generator)


def measure(contestants: Sequence[Contestant], rounds: int, random: Random) -> dict[tuple[str, str], list[Spent]]:
    """What each round took, by the contestant's name and the direction."""
    spent: dict[tuple[str, str], list[Spent]] = {
        (one.name, direction): [] for one, direction in itertools.product(contestants, DIRECTIONS)
    }
    for number in track(range(rounds + 1), description="rounds"):
        for one in random.sample(contestants, len(contestants)):
            for direction, work in (("write", one.write), ("read", one.read)):
                took = work()
                if number:
                    spent[one.name, direction].append(took)
    return spent


def speed(spent: Sequence[Spent], nbytes: int) -> float:
    """GB/s at the median round."""
    return nbytes / statistics.median(each.wall for each in spent) / 1e9


def cpu(spent: Sequence[Spent], nbytes: int) -> float:
    """Seconds for a GB at the median round."""
    return statistics.median(each.cpu for each in spent) / nbytes * 1e9


def ratios(spent: dict[tuple[str, str], list[Spent]], nbytes: int) -> dict[tuple[str, str], float]:
    """How many times as fast as the best of each kind of peer the disk tier is, by the kind and the direction."""
    found = {}
    for kind, direction in DEMANDED:
        peers = [
            speed(each, nbytes) for (name, way), each in spent.items() if way == direction and name.startswith(kind)
        ]
        if peers:
            found[kind, direction] = speed(spent[TIER, direction], nbytes) / max(peers)
    return found


def show(spent: dict[tuple[str, str], list[Spent]], nbytes: int, console: Console) -> None:
    table = Table("median (least to most)", "write GB/s", "CPU s/GB", "read GB/s", "CPU s/GB")
    for name in dict.fromkeys(name for name, _ in spent):
        row = [name]
        for direction in DIRECTIONS:
            each = spent[name, direction]
            rates = [nbytes / took.wall / 1e9 for took in each]
            row += [f"{speed(each, nbytes):.2f} ({min(rates):.1f}-{max(rates):.1f})", f"{cpu(each, nbytes):.2f}"]
        table.add_row(*row)
    console.print(table)
    table = Table("the disk tier's speed over", "direction", "ratio", "demanded")
    for (kind, direction), ratio in ratios(spent, nbytes).items():
        table.add_row(
            "the best of fio" if kind == "fio" else kind,
            direction,
            f"{ratio:.2f}",
            f"{DEMANDED[kind, direction]:.1f}",
        )
    console.print(table)


def figures(spent: dict[tuple[str, str], list[Spent]], nbytes: int) -> dict[str, float]:
    found: dict[str, float] = {"bytes": nbytes}
    for (name, direction), each in spent.items():
        found[f"{name}, {direction} (GB/s)"] = speed(each, nbytes)
        found[f"{name}, {direction}, CPU (s/GB)"] = cpu(each, nbytes)
    for (kind, direction), ratio in ratios(spent, nbytes).items():
        found[f"{TIER}, {direction}, over {kind}"] = ratio
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = [Path(tempfile.gettempdir())]
    parser.add_argument("--dir", type=Path, nargs="+", default=here, help="on the drive to measure, or on each")
    parser.add_argument("--bytes", type=parse_bytes, default=1 << 30, help="of each round, such as 1GiB")
    parser.add_argument("--record", type=parse_bytes, default=16 << 20, help="of each record, such as 16MiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--checksum", help="of the disk tier: xxh3_64, crc32 or none")
    parser.add_argument("--seed", type=int, default=0, help="of the data and of the order")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
