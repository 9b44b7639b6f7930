"""Programs of several ranks, by ctypes, that end in an error or race; and what a communicator takes of memory."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from typing import Any

import ascend_emulator

from emulator.tests.ranks import FP32, SUM, Program, Rank, floats_at, mine, together

RANKS = 4


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
        ascend_emulator.inject("device:1")
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


WRONG: dict[str, tuple[int, Program, dict[str, str]]] = {
    "out_of_order": (RANKS, out_of_order, {}),
    "another_size": (RANKS, another_size, {}),
    "dies": (RANKS, dies, {}),
    "leaves": (RANKS, leaves, {}),
    "loses_its_device": (RANKS, loses_its_device, {}),
    "told_to_fail": (2, told_to_fail, {}),
    "on_one_device": (2, on_one_device, {}),
    "memory": (2, memory, {"HCCL_BUFFSIZE": "100"}),
    "too_little_memory": (2, too_little_memory, {"HCCL_BUFFSIZE": "5000"}),
}
# They end when the time that they wait is over.
WAITING: dict[str, tuple[int, Program, dict[str, str]]] = {
    "not_called": (RANKS, not_called, {"HCCL_EXEC_TIMEOUT": "5"}),
    "both_send_first": (2, both_send_first, {"HCCL_EXEC_TIMEOUT": "1"}),
    "never_comes": (RANKS, never_comes, {"HCCL_CONNECT_TIMEOUT": "10"}),
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


def results_of(programs: Mapping[str, tuple[int, Program, dict[str, str]]]) -> dict[str, Any]:
    return {
        name: together(ranks, program, **({"HCCL_BUFFSIZE": "1"} | environment))
        for name, (ranks, program, environment) in programs.items()
    }


def run_wrong() -> dict[str, Any]:
    return results_of(WRONG)


def run_waiting() -> dict[str, Any]:
    return results_of(WAITING)


def run_racing() -> dict[str, Any]:
    return {name: together(2, program, HCCL_BUFFSIZE="1") for name, program in RACING.items()}
