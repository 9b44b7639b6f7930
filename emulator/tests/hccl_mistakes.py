"""Mistakes of programs with torch.distributed, beside what is right, in a job of two ranks with the race detector.

Run by torch.distributed.run with the name of what to do. Each rank prints a line of JSON with what came of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import ascend_emulator
import torch
import torch.distributed as dist

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def raced(program: Callable[[bool], Any], waits: bool) -> list[Any]:
    """Pairs of operations that raced, and whether the program's own lines are in their stacks."""
    torch.npu.synchronize()
    ascend_emulator.clear_races()
    program(waits)
    torch.npu.synchronize()
    return [
        [race.first.operation, race.second.operation, __file__ in str(race.first) + str(race.second)]
        for race in ascend_emulator.races()
    ]


def read_without_wait(waits: bool) -> None:
    x = torch.ones(1 << 10, device="npu")
    work = dist.all_reduce(x, async_op=True)
    if waits:
        work.wait()
    time.sleep(2.5)  # torch_npu's watchdog has seen its end by now; that is no wait
    x * 2
    work.wait()


def buffer_used_again(waits: bool) -> None:
    x, gathered = torch.ones(1 << 10, device="npu"), torch.empty(RANKS << 10, device="npu")
    work = dist.all_gather_into_tensor(gathered, x, async_op=True)
    if waits:
        work.wait()
    x.zero_()
    work.wait()


def side_stream(waits: bool) -> None:
    """Made on a stream that the collective's caller does not wait for."""
    x, stream = torch.ones(1 << 10, device="npu"), torch.npu.Stream()
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        x.mul_(2)
    if waits:
        torch.npu.current_stream().wait_stream(stream)
    dist.all_reduce(x)


def races() -> dict[str, Any]:
    programs = (read_without_wait, buffer_used_again, side_stream)
    return {each.__name__: {str(waits): raced(each, waits) for waits in (True, False)} for each in programs}


def disorder() -> Any:
    x, y = torch.ones(8, device="npu"), torch.ones(8, device="npu")
    for tensor, dst in ((x, None), (y, 0)) if RANK else ((y, 0), (x, None)):
        dist.all_reduce(tensor) if dst is None else dist.broadcast(tensor, src=dst)
    return error_of(x.sum().item)  # on the current stream, which has waited for the collective's


def death() -> Any:
    x = torch.ones(8, device="npu")
    dist.all_reduce(x)
    torch.npu.synchronize()
    if RANK == 1:
        os._exit(0)
    dist.all_reduce(x)
    time.sleep(100)  # the watchdog does not let it
    return ""


def one_device() -> Any:
    torch.npu.set_device(0)
    return error_of(lambda: dist.all_reduce(torch.ones(1, device="npu:0")))


def capture() -> Any:
    """A collective in a graph, and one after that."""
    x, graph = torch.ones(8, device="npu"), torch.npu.NPUGraph()
    stream, errors = torch.npu.current_stream(), []

    def captured() -> None:
        with torch.npu.graph(graph):
            errors.append(error_of(lambda: dist.all_reduce(x)))

    errors.append(error_of(captured))
    torch.npu.set_stream(stream)
    dist.all_reduce(x)
    return [*errors, x.tolist()]


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.npu.set_device(RANK)
    dist.init_process_group("hccl")
    found = {"races": races, "disorder": disorder, "death": death, "one_device": one_device, "capture": capture}[
        sys.argv[1]
    ]()
    print(json.dumps({"rank": RANK, "found": found}), flush=True)
    os._exit(0) if sys.argv[1] != "races" else dist.destroy_process_group()
