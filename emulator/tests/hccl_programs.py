"""Programs of several ranks, by ctypes, that are right. Each rank returns what they leave in memory."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

from emulator.tests.ranks import (
    BF16,
    FP32,
    INT8,
    INT64,
    MAXIMUM,
    RECEIVE,
    SEND,
    SUM,
    Item,
    Program,
    Rank,
    floats_at,
    mine,
    together,
)

RANKS = 4


def collectives(rank: Rank) -> Any:
    """One of each; what they leave in memory, row by row."""
    group, n, me = rank.communicator(), rank.ranks, rank.number
    results: list[tuple[int, int]] = []

    def out(count: int) -> int:
        results.append((rank.floats([-1] * count), count))
        return results[-1][0]

    given = rank.floats(mine(rank))
    rank.put("HcclAllReduce", given, out(4), 4, FP32, SUM, group)
    rank.put("HcclAllReduce", given, out(4), 4, FP32, MAXIMUM, group)
    rank.put("HcclReduce", given, out(4), 4, FP32, SUM, 2, group)
    rank.put("HcclAllGather", given, out(4 * n), 4, FP32, group)
    rank.put("HcclReduceScatter", rank.floats(mine(rank, 2 * n)), out(2), 2, FP32, SUM, group)
    rank.put("HcclScatter", rank.floats(mine(rank, 2 * n)), out(2), 2, FP32, 3, group)
    rank.put("HcclAlltoAll", rank.floats(mine(rank, 2 * n)), 2, FP32, out(2 * n), 2, FP32, group)
    broadcast = rank.floats(mine(rank))
    results.append((broadcast, 4))
    rank.put("HcclBroadcast", broadcast, 4, FP32, 1, group)
    # Rank r sends i + 1 elements to rank i, from where a gap of one lies between.
    counts, starts = [i + 1 for i in range(n)], [sum(range(i + 2)) - 1 + i for i in range(n)]
    expected, places = [me + 1] * n, [i * (me + 2) for i in range(n)]
    rank.put(
        "HcclAlltoAllV",
        *(rank.floats(mine(rank, 20)), numbers(counts), numbers(starts), FP32),
        *(out(n * (me + 2)), numbers(expected), numbers(places), FP32, group),
    )
    rank.put("HcclBarrier", group)
    rank.join()
    return [floats_at(pointer, count) for pointer, count in results]


def numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * len(values))(*values)


def order_of_sums(rank: Rank) -> Any:
    """Sums whose last bits tell in what order, and with what rounding, they were made."""
    group = rank.communicator()
    total = rank.floats([(1e8, 1.0, -1e8, 0.25)[rank.number]])
    rank.put("HcclAllReduce", total, total, 1, FP32, SUM, group)
    halves = rank.acl.malloc(64)
    bits = (0x4380, 0x3F80, 0x3F80, 0x3F80)[rank.number]  # 256, 1, 1, 1
    ctypes.memmove(halves, array("H", [bits]).tobytes(), 2)
    rank.put("HcclAllReduce", halves, halves, 1, BF16, SUM, group)
    rank.join()
    return [floats_at(total, 1)[0], hex(array("H", ctypes.string_at(halves, 2))[0])]


def other_types(rank: Rank) -> Any:
    group = rank.communicator()
    small, large = rank.acl.malloc(64), rank.acl.malloc(64)
    ctypes.memmove(small, array("b", [100 * rank.number]).tobytes() if rank.number < 2 else b"\1", 1)
    ctypes.memmove(large, array("q", [1 << 40]).tobytes(), 8)
    rank.put("HcclAllReduce", small, small, 1, INT8, SUM, group)
    rank.put("HcclAllReduce", large, large, 1, INT64, SUM, group)
    refused = rank.call("HcclAllReduce", large, large, 1, 10, SUM, group, rank.stream)  # fp64
    rank.join()
    return [ctypes.string_at(small, 1)[0], array("q", ctypes.string_at(large, 8))[0], refused]


def transfers(rank: Rank) -> Any:
    """A message from 0 to 1 and back; then a ring of batches, with three messages to the same peer."""
    group, n, me = rank.communicator(), rank.ranks, rank.number
    one = rank.floats(mine(rank))
    if me == 0:
        rank.put("HcclSend", one, 4, FP32, 1, group)
        rank.put("HcclRecv", one, 4, FP32, 1, group)
    elif me == 1:
        other = rank.floats([0] * 4)
        rank.put("HcclRecv", other, 4, FP32, 0, group)
        rank.put("HcclSend", other, 4, FP32, 0, group)
        one = other
    got = [rank.floats([-1] * 2) for _ in range(3)]
    items = [Item(SEND, rank.floats([100 * me + i, i]), 2, FP32, (me + 1) % n) for i in range(3)]
    items += [Item(RECEIVE, each, 2, FP32, (me - 1) % n) for each in got]
    rank.put("HcclBatchSendRecv", (Item * 6)(*items), 6, group)
    rank.call("HcclGroupStart")
    grouped = rank.floats([-1])
    rank.put("HcclSend", rank.floats([me]), 1, FP32, (me + 2) % n, group)
    rank.put("HcclRecv", grouped, 1, FP32, (me + 2) % n, group)
    assert rank.call("HcclGroupEnd") == 0
    rank.join()
    return [floats_at(one, 4), *[floats_at(each, 2) for each in got], floats_at(grouped, 1)]


def groups(rank: Rank) -> Any:
    """Two groups, and one of all: in the opposite order on half of the ranks, each on a stream of its own."""
    everybody = rank.communicator()
    half = rank.communicator([0, 1] if rank.number < 2 else [2, 3])
    other_stream = rank.acl.made("aclrtCreateStream")
    a, b = rank.floats([rank.number]), rank.floats([rank.number])
    calls = [(a, everybody, rank.stream), (b, half, other_stream)]
    for pointer, group, stream in calls if rank.number % 2 else reversed(calls):
        for _ in range(2):
            rank.put("HcclAllReduce", pointer, pointer, 1, FP32, SUM, group, stream=stream)
    rank.join()
    rank.join(other_stream)
    size = ctypes.c_uint32()
    rank.call("HcclGetRankSize", half, ctypes.byref(size))
    destroyed = [rank.call("HcclCommDestroy", half) for _ in range(2)]
    return [floats_at(a, 1), floats_at(b, 1), size.value, destroyed]


def met_outside(rank: Rank) -> Any:
    """Rank 1 waits for the sum, and only then tells the others, who have issued it and wait for nothing else."""
    group = rank.communicator()
    total = rank.floats([rank.number])
    rank.put("HcclAllReduce", total, total, 1, FP32, SUM, group)
    if rank.number == 1:
        rank.join()
        rank.root([1, 0, 2, 3])  # any message will do
    else:
        rank.root([1, 0, 2, 3])
        rank.join()
    return floats_at(total, 1)


def large(rank: Rank) -> Any:
    """More than the size from which a tray is given back, three times."""
    group, count = rank.communicator(), 6 << 20
    block = rank.acl.malloc(4 * count)
    ctypes.memset(block, 0, 4 * count)
    for place in (0, count - 1):
        ctypes.c_float.from_address(block + 4 * place).value = rank.number + 1
    for _ in range(3):
        rank.put("HcclAllReduce", block, block, count, FP32, SUM, group)
    rank.join()
    return [ctypes.c_float.from_address(block + 4 * place).value for place in (0, 1, count - 1)]


RIGHT: dict[str, Program] = {
    program.__name__: program
    for program in (collectives, order_of_sums, other_types, transfers, groups, met_outside, large)
}


def run_right() -> dict[str, Any]:
    return {name: together(RANKS, program, HCCL_BUFFSIZE="1") for name, program in RIGHT.items()}
