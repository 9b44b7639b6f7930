"""How fast a model leaves the device and comes back, beside one copy of as many bytes.

    python -m ascend_emulator --clock 910b3 --dry --hbm 64GiB --host 512GiB -m benchmarks.phase_speed

A GPT leaves by `manager.offload` and comes back by `manager.reload`: as it is, and under FSDP2, where each layer is
a group of its own. Each round times both ways by events on the device, and between them one copy of a pinned tensor
of as many bytes in each direction. What is told are GB/s at the median round, and those over the copy's. The first
round, in which the host memory is pinned, does not count. On the modelled clock the figures are the same on each
machine.

It is one process with a group of its own, or each rank of what torch.distributed.run has started.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.report import report
from examples.devices import accelerator, find_device
from examples.gpt import GPT
from tiered_mem import TieringManager
from tiered_mem.device.device import Device

RATE_AT_LEAST = 0.95  # of the copy's
BACKENDS = {"npu": "hccl", "cuda": "nccl"}
PLAIN, SHARDED = "plain", "FSDP2"
TO_HOST, TO_DEVICE = "to host", "to device"


def main() -> None:
    options = parse()
    kind = find_device("-m benchmarks.phase_speed")
    rank, ranks = start_group(kind)
    result: dict[str, object] = {"ranks": ranks}
    for name in (PLAIN, SHARDED):
        result |= figures(name, *measured(name, Device(kind), ranks, options))
    dist.destroy_process_group()
    if rank == 0:
        report(result, Console(highlight=False), options.json)


def start_group(kind: str) -> tuple[int, int]:
    """Joins the other ranks, or makes a group of this process alone. The rank, and how many there are."""
    if "RANK" in os.environ:
        accelerator(kind).set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(BACKENDS[kind])
    else:
        dist.init_process_group(BACKENDS[kind], store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


def measured(
    name: str, device: Device, ranks: int, options: argparse.Namespace
) -> tuple[int, dict[tuple[bool, str], list[float]]]:
    """A model's bytes here; and the seconds of each round, of phases and of copies, in each direction."""
    with torch.device(device.torch_device):
        model: nn.Module = GPT(layers=options.layers, width=options.width, heads=16, context=1024)
    if name == SHARDED:
        mesh = init_device_mesh(device.kind, (ranks,))
        for layer in model.get_submodule("layers").children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    stream = device.current_stream()
    seconds: dict[tuple[bool, str], list[float]] = {}
    host_bytes = 2 * sum(parameter.nbytes for parameter in model.parameters())
    with TieringManager(policy="lru", device=device.torch_device, host_bytes=host_bytes) as manager:
        manager.offload(model)
        nbytes = int(manager.stats()["parked.bytes.current"])
        manager.reload(model)
        on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device)
        on_host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        for number in range(options.rounds + 1):
            for phase, direction, move in (
                (True, TO_HOST, lambda: manager.offload(model)),
                (False, TO_HOST, lambda: on_host.copy_(on_device, non_blocking=True)),
                (True, TO_DEVICE, lambda: manager.reload(model)),
                (False, TO_DEVICE, lambda: on_device.copy_(on_host, non_blocking=True)),
            ):
                start = device.timed_event(stream)
                move()
                end = device.timed_event(stream)
                end.synchronize()
                if number:
                    seconds.setdefault((phase, direction), []).append(device.elapsed(start, end))
    return nbytes, seconds


def figures(name: str, nbytes: int, seconds: dict[tuple[bool, str], list[float]]) -> dict[str, object]:
    """What is told of a model."""
    told: dict[str, object] = {f"{name} (bytes of a rank)": nbytes}
    for direction in (TO_HOST, TO_DEVICE):
        phase, copy = (statistics.median(seconds[which, direction]) for which in (True, False))
        told[f"{name}, {direction} (GB/s)"] = nbytes / phase / 1e9
        told[f"{name}, {direction}, over one copy's"] = copy / phase
    return told


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
