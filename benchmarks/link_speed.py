"""How fast copies from and to host memory are, from a slab of each source beside a pinned tensor of torch's own.

Each round copies the same bytes once with every kind of memory, in turns, timed by events on the device. What is
told is GB/s at the median round, and that over torch's. Sources that this machine does not have are left out.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.report import report
from examples.devices import find_device
from tiered_mem.allocators import SlabPool
from tiered_mem.device.device import Device
from tiered_mem.errors import PinningFailed
from tiered_mem.sizes import parse_bytes
from tiered_mem.tiers.host_tier import bytes_of
from tiered_mem.tiers.pinning import chosen_pool

SOURCES = {"npu": ("acl", "npurt", "acl-register"), "cuda": ("cuda", "cudart", "cuda-register")}
PEER = "torch's own"


def main() -> None:
    options = parse()
    kind = find_device("-m benchmarks.link_speed")
    device = Device(kind)
    console = Console()
    hosts = {PEER: torch.empty(options.size, dtype=torch.uint8, pin_memory=True)}
    pools: list[SlabPool] = []
    for name in (*SOURCES[kind], "pages"):
        try:
            pools.append(chosen_pool(device, options.size, name, preallocate=True)[1])
        except PinningFailed as error:
            console.print(f"{name} is left out: {error}", highlight=False)
            continue
        hosts[name] = bytes_of(pools[-1].allocate(options.size))
    seconds = measure(device, hosts, options.rounds)
    result: dict[str, object] = {"device": name_of(device), "bytes": options.size}
    for direction in ("to host", "to device"):
        peer = statistics.median(seconds[PEER, direction])
        for name in hosts:
            median = statistics.median(seconds[name, direction])
            result[f"{name}, {direction} (GB/s)"] = options.size / median / 1e9
            if name != PEER:
                result[f"{name}, {direction}, over torch's"] = peer / median
    report(result, console, options.json)


def measure(device: Device, hosts: dict[str, torch.Tensor], rounds: int) -> dict[tuple[str, str], list[float]]:
    """The seconds of each round by the memory's name and the direction."""
    stream = device.current_stream()
    on_device = torch.zeros_like(hosts[PEER], device=device.torch_device)
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in track(range(rounds + 1), description="rounds"):
        for name, host in hosts.items():
            for direction, to, of in (("to host", host, on_device), ("to device", on_device, host)):
                start = device.timed_event(stream)
                to.copy_(of, non_blocking=True)
                end = device.timed_event(stream)
                end.synchronize()
                if number:  # the first one touches the memory
                    seconds.setdefault((name, direction), []).append(device.elapsed(start, end))
    return seconds


def name_of(device: Device) -> str:
    return torch.cuda.get_device_name(device.torch_device) if device.kind == "cuda" else str(device.torch_device)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_bytes, default=256 << 20, help="of each copy, such as 256MiB")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
