"""Programs of several ranks, by ctypes: right ones, and wrong ones that must end in an error or be a race."""

from __future__ import annotations

import ctypes
import os
import time
from array import array
from collections.abc import Sequence
from typing import Any

import ascend_emulator

from tests.emulator.ranks import (
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
    together,
)

RANKS = 4


def mine(rank: Rank, count: int = 4) -> list[float]:
    """Small whole numbers, other ones on each rank."""
    return [10.0 * rank.number + i for i in range(count)]


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


def memory(rank: Rank) -> Any:
    """What is free before, with and after a communicator, in MiB."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()

    def now() -> int:
        rank.acl.check("aclrtGetMemInfo", 0, ctypes.byref(free), ctypes.byref(total))
        return free.value >> 20

    before = now()
    group = rank.communicator()
    held = now()
    rank.call("HcclCommDestroy", group)
    return [before, held, now()]


def too_little_memory(rank: Rank) -> Any:
    return rank.communicator()


def out_of_order(rank: Rank) -> Any:
    group = rank.communicator()
    a, b = rank.floats(mine(rank)), rank.floats(mine(rank))
    calls = [("HcclAllReduce", a, a, 4, FP32, SUM, group), ("HcclBroadcast", b, 4, FP32, 0, group)]
    for function, *arguments in calls if rank.number else reversed(calls):
        rank.put(function, *arguments)
    return rank.error()


def another_size(rank: Rank) -> Any:
    group = rank.communicator()
    a = rank.floats(mine(rank, 8))
    rank.put("HcclAllReduce", a, a, 4 + (rank.number == 2), FP32, SUM, group)
    return rank.error()


def not_called(rank: Rank) -> Any:
    group = rank.communicator()
    a = rank.floats(mine(rank))
    rank.put("HcclAllReduce", a, a, 4, FP32, SUM, group)
    if rank.number != 1:
        rank.put("HcclAllGather", a, rank.floats([0] * 16), 4, FP32, group)
    return rank.error() or wait_until(lambda: asynchronous_error(rank, group))


def both_send_first(rank: Rank) -> Any:
    """The two of a pair."""
    group = rank.communicator()
    a, b = rank.floats(mine(rank)), rank.floats(mine(rank))
    rank.put("HcclSend", a, 4, FP32, 1 - rank.number, group)
    rank.put("HcclRecv", b, 4, FP32, 1 - rank.number, group)
    return rank.error()


def dies(rank: Rank) -> Any:
    group = rank.communicator()
    a = rank.floats(mine(rank))
    rank.put("HcclAllReduce", a, a, 4, FP32, SUM, group)
    rank.join()
    if rank.number == 3:
        os.abort()
    rank.put("HcclAllReduce", a, a, 4, FP32, SUM, group)
    return rank.error()


def leaves(rank: Rank) -> Any:
    group = rank.communicator()
    a = rank.floats(mine(rank))
    if rank.number == 3:
        rank.call("HcclCommDestroy", group)
        time.sleep(1)  # the others must not take it for dead
        return ""
    rank.put("HcclAllReduce", a, a, 4, FP32, SUM, group)
    return rank.error()


def never_comes(rank: Rank) -> Any:
    if rank.number == 2:
        return rank.root(range(rank.ranks)) and ""
    return rank.communicator()


def loses_its_device(rank: Rank) -> Any:
    group = rank.communicator()
    a = rank.floats(mine(rank))
    if rank.number == 2:
        ascend_emulator.inject("device:2")
        rank.call("HcclAllReduce", a, a, 4, FP32, SUM, group, rank.stream)
    else:
        rank.put("HcclAllReduce", a, a, 4, FP32, SUM, group)
    return rank.error()


def told_to_fail(rank: Rank) -> Any:
    group = rank.communicator()
    a = rank.floats(mine(rank))
    codes = []
    for function in ("HcclAllReduce", "HcclCommInitRootInfo"):
        ascend_emulator.inject(f"{function}:1")
        codes.append([rank.call(function, a, a, 4, FP32, SUM, group, rank.stream), rank.acl.message()])
    rank.put("HcclAllReduce", a, a, 4, FP32, SUM, group)
    rank.join()
    return [codes, floats_at(a, 4)]


def on_one_device(rank: Rank) -> Any:
    rank.acl.check("aclrtSetDevice", 0)
    return rank.communicator()


def asynchronous_error(rank: Rank, group: int) -> str:
    code = ctypes.c_int()
    rank.call("HcclGetCommAsyncError", group, ctypes.byref(code))
    return rank.acl.message() if code.value else ""


def wait_until(answer: Any) -> Any:
    while not (said := answer()):
        time.sleep(0.01)
    return said


def raced(program: Any) -> Program:
    """The program, which returns what the detector finds: pairs of operations."""

    def watched(rank: Rank) -> Any:
        ascend_emulator.clear_races()
        program(rank)
        rank.acl.check("aclrtSynchronizeDevice")
        return [[race.first.operation, race.second.operation] for race in ascend_emulator.races()]

    return watched


def used_elsewhere(waits: bool, what: str) -> Program:
    """Another stream reads the result, or overwrites what is given, with or without a wait."""

    @raced
    def program(rank: Rank) -> None:
        group = rank.communicator()
        given, got = rank.floats(mine(rank)), rank.floats([0] * 16)
        other = rank.acl.made("aclrtCreateStream")
        rank.put("HcclAllGather", given, got, 4, FP32, group)
        if waits:
            event = rank.acl.made("aclrtCreateEvent")
            rank.acl.check("aclrtRecordEvent", event, rank.stream)
            rank.acl.check("aclrtStreamWaitEvent", other, event)
        if what == "result":
            rank.acl.copy(3, rank.floats([0] * 16), got, 64, other)
        else:
            rank.acl.check("aclrtMemsetAsync", given, 16, 0, 16, other)

    return program


def issued_too_early(waits: bool) -> Program:
    """What is given is written on another stream, for which the collective waits or not."""

    @raced
    def program(rank: Rank) -> None:
        group = rank.communicator()
        given = rank.floats(mine(rank))
        other = rank.acl.made("aclrtCreateStream")
        rank.acl.check("aclrtMemsetAsync", given, 16, 0, 16, other)
        if waits:
            event = rank.acl.made("aclrtCreateEvent")
            rank.acl.check("aclrtRecordEvent", event, other)
            rank.acl.check("aclrtStreamWaitEvent", rank.stream, event)
        rank.put("HcclAllReduce", given, given, 4, FP32, SUM, group)

    return program


RIGHT: dict[str, Program] = {
    program.__name__: program
    for program in (collectives, order_of_sums, other_types, transfers, groups, met_outside, large)
}
WRONG: dict[str, tuple[int, Program, dict[str, str]]] = {
    "out_of_order": (RANKS, out_of_order, {}),
    "another_size": (RANKS, another_size, {}),
    "not_called": (RANKS, not_called, {"HCCL_EXEC_TIMEOUT": "1"}),
    "both_send_first": (2, both_send_first, {"HCCL_EXEC_TIMEOUT": "1"}),
    "dies": (RANKS, dies, {}),
    "leaves": (RANKS, leaves, {}),
    "never_comes": (RANKS, never_comes, {"HCCL_CONNECT_TIMEOUT": "1"}),
    "loses_its_device": (RANKS, loses_its_device, {}),
    "told_to_fail": (2, told_to_fail, {}),
    "on_one_device": (2, on_one_device, {}),
    "memory": (2, memory, {"HCCL_BUFFSIZE": "100"}),
    "too_little_memory": (2, too_little_memory, {"HCCL_BUFFSIZE": "5000"}),
}
RACING: dict[str, Program] = {
    f"{name}, {'waited for' if waits else 'not waited for'}": program
    for waits in (True, False)
    for name, program in (
        ("the result read elsewhere", used_elsewhere(waits, "result")),
        ("what is given overwritten elsewhere", used_elsewhere(waits, "given")),
        ("what is given written elsewhere", issued_too_early(waits)),
    )
}


def run_right() -> dict[str, Any]:
    return {name: together(RANKS, program, HCCL_BUFFSIZE="1") for name, program in RIGHT.items()}


def run_wrong() -> dict[str, Any]:
    return {
        name: together(ranks, program, **({"HCCL_BUFFSIZE": "1"} | environment))
        for name, (ranks, program, environment) in WRONG.items()
    }


def run_racing() -> dict[str, Any]:
    return {name: together(2, program, HCCL_BUFFSIZE="1") for name, program in RACING.items()}
