"""What torch.distributed can do, on the emulated NPUs by HCCL and on the CPU by gloo, in a job of several ranks.

Run by torch.distributed.run. Each rank prints a line of JSON: its number, and what differed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from emulator.tests.hccl_rank import RANK, RANKS, rank_of_job

Check = Callable[[str], object]

CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """A check returns the same on the NPU as on the CPU."""
    CHECKS[function.__name__] = function
    return function


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers, other ones on each rank: their sums do not depend on the order."""
    generator = torch.Generator().manual_seed(100 * seed + RANK)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


@check
def all_reduce(device: str) -> object:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.int8]
    sums = [values(257, seed=i, dtype=dtype).to(device) for i, dtype in enumerate(dtypes)]
    for each in sums:
        dist.all_reduce(each)
    extremes = [values(31, seed=7).to(device), values(31, seed=8).to(device), values(31, seed=9).to(device)]
    for each, op in zip(extremes, [dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT], strict=True):
        dist.all_reduce(each, op=op)
    return sums + extremes


@check
def all_reduce_of_means(device: str) -> object:
    mean = values(64).to(device)
    dist.all_reduce(mean, op=dist.ReduceOp.SUM if device == "cpu" else dist.ReduceOp.AVG)
    return mean / RANKS if device == "cpu" else mean


@check
def all_reduce_of_a_view(device: str) -> object:
    whole = values(40).to(device)
    dist.all_reduce(whole[8:24])
    return whole


@check
def broadcast(device: str) -> object:
    tensors = [values(9, seed=root).to(device) for root in range(RANKS)]
    for root, each in enumerate(tensors):
        dist.broadcast(each, src=root)
    flags = torch.tensor([RANK == 1, True], device=device)
    dist.broadcast(flags, src=RANKS - 1)
    return [*tensors, flags]


@check
def reduce(device: str) -> object:
    x = values(17).to(device)
    dist.reduce(x, dst=1)
    return x if RANK == 1 else None


@check
def all_gather(device: str) -> object:
    even = [torch.empty(5, device=device) for _ in range(RANKS)]
    dist.all_gather(even, values(5).to(device))
    flat = torch.empty(RANKS * 6, device=device)
    dist.all_gather_into_tensor(flat, values(6).to(device))
    return [*even, flat]


@check
def all_gather_uneven(device: str) -> object:
    if device == "cpu":  # gloo refuses
        return [torch.arange(3.0 + rank) + rank for rank in range(RANKS)]
    outputs = [torch.empty(3 + rank, device=device) for rank in range(RANKS)]
    dist.all_gather(outputs, (torch.arange(3.0 + RANK) + RANK).to(device))
    return outputs


@check
def all_gather_coalesced(device: str) -> object:
    outputs = [torch.empty(RANKS * 4, device=device) for _ in range(3)]
    inputs = [values(4, seed=i).to(device) for i in range(3)]
    if device == "cpu":
        for output, each in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, each)
        return outputs
    with _coalescing_manager(device=torch.device(device), async_ops=True) as batch:
        for output, each in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, each)
    batch.wait()
    return outputs


@check
def reduce_scatter(device: str) -> object:
    flat, parts = torch.empty(3, device=device), torch.empty(4, device=device)
    whole = values(RANKS * 3).to(device)
    rows = [values(4, seed=1 + rank).to(device) for rank in range(RANKS)]
    if device == "cpu":
        dist.all_reduce(whole)
        dist.all_reduce(stacked := torch.stack(rows))
        return whole.chunk(RANKS)[RANK], stacked[RANK]
    dist.reduce_scatter_tensor(flat, whole)
    dist.reduce_scatter(parts, rows)
    return flat, parts


@check
def scatter(device: str) -> object:
    out = torch.empty(4, device=device)
    dist.scatter(out, [values(4, seed=rank).to(device) for rank in range(RANKS)] if RANK == 0 else None, src=0)
    return out


@check
def gather(device: str) -> object:
    outputs = [torch.empty(4, device=device) for _ in range(RANKS)] if RANK == 0 else None
    dist.gather(values(4).to(device), outputs, dst=0)
    return outputs


@check
def all_to_all(device: str) -> object:
    even = torch.empty(RANKS * 2, device=device)
    dist.all_to_all_single(even, values(RANKS * 2).to(device))
    uneven = torch.empty(RANKS * (RANK + 1), device=device)
    sizes = [rank + 1 for rank in range(RANKS)]
    dist.all_to_all_single(uneven, values(sum(sizes), seed=1).to(device), [RANK + 1] * RANKS, sizes)
    if device == "cpu":  # gloo has no all-to-all of lists
        return even, uneven, uneven
    lists = [torch.empty(RANK + 1, device=device) for _ in range(RANKS)]
    dist.all_to_all(lists, list(values(sum(sizes), seed=1).to(device).split(sizes)))
    return even, uneven, torch.cat(lists)


@check
def send_and_receive(device: str) -> object:
    x = values(6).to(device)
    if RANK == 0:
        dist.send(x, 1)
        dist.recv(x, 1)
    elif RANK == 1:
        received = torch.empty_like(x)
        dist.recv(received, 0)
        dist.send(received * 2, 0)
        return received
    return x


@check
def a_ring_of_batches(device: str) -> object:
    sent, received = (
        [values(3, seed=i).to(device) for i in range(3)],
        [torch.empty(3, device=device) for _ in range(3)],
    )
    steps = [dist.P2POp(dist.isend, each, (RANK + 1) % RANKS) for each in sent]
    steps += [dist.P2POp(dist.irecv, each, (RANK - 1) % RANKS) for each in received]
    for work in dist.batch_isend_irecv(steps):
        work.wait()
    return received


@check
def several_at_once(device: str) -> object:
    tensors = [values(1 << 12, seed=i).to(device) for i in range(6)]
    for work in [dist.all_reduce(each, async_op=True) for each in tensors]:
        work.wait()
    return [each * 2 for each in tensors]


@check
def tensors_that_are_dropped_at_once(device: str) -> object:
    for i in range(10):
        dist.all_reduce(values(1 << 12, seed=i).to(device), async_op=True)
        torch.full((1 << 12,), -1.0, device=device)
    dist.barrier()
    return None


@check
def objects(device: str) -> object:
    everyone, first = [None] * RANKS, [{"rank": RANK}]
    dist.all_gather_object(everyone, {"rank": RANK})
    dist.broadcast_object_list(first, src=0, device=torch.device(device))
    return everyone, first


@check
def sub_groups(device: str) -> object:
    x = values(8).to(device)
    if RANK in (0, RANKS - 1):
        dist.all_reduce(x, group=GROUP)
    return x


@check
def nothing_at_all(device: str) -> object:
    x = torch.empty(0, device=device)
    dist.all_reduce(x)
    return x


def equal(ours: object, theirs: object) -> bool:
    if isinstance(theirs, Tensor):
        return isinstance(ours, Tensor) and torch.equal(ours.cpu(), theirs)
    if isinstance(theirs, list | tuple):
        return isinstance(ours, list | tuple) and all(map(equal, ours, theirs)) and len(ours) == len(theirs)
    return ours == theirs


if __name__ == "__main__":
    with rank_of_job("cpu:gloo,npu:hccl") as said:
        GROUP = dist.new_group([0, RANKS - 1])
        found = {}
        for name, function in CHECKS.items():
            ours = function("npu")
            if not equal(ours, theirs := function("cpu")):
                found[name] = f"{ours} is not {theirs}"
        said |= {"checks": len(CHECKS), "wrong": found}
