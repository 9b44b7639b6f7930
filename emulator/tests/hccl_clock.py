"""Programs of several ranks that tell when, in modelled time, what happened. See hccl_programs.py."""

from __future__ import annotations

import ctypes
import random
import time
from typing import Any

import ascend_emulator

from emulator.tests.ranks import FP32, SUM, Program, Rank, together

BYTES = 1_000_000  # of an all-reduce of two ranks: 12 us, and 50 us of bytes
FLOATS = BYTES // 4


class Watch:
    """What a rank needs for such a program, and a list of what its streams did."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.group = rank.communicator()
        self.block = rank.acl.malloc(BYTES)
        self.other = rank.acl.malloc(100 * BYTES)
        self.streams = [rank.stream, *(rank.acl.made("aclrtCreateStream") for _ in range(2))]
        self._number = {stream: place for place, stream in enumerate(self.streams)}

    def fill(self, stream: int, nbytes: int) -> None:
        place = self.other + stream * 30 * BYTES
        self.rank.acl.check("aclrtMemsetAsync", place, 30 * BYTES, 0, nbytes, self.streams[stream])

    def reduce(self, stream: int, nbytes: int = BYTES, group: int | None = None) -> None:
        arguments = (self.block, self.block, nbytes // 4, FP32, SUM, group or self.group)
        self.rank.put("HcclAllReduce", *arguments, stream=self.streams[stream])

    def order(self, first: int, then: int) -> None:
        event = self.rank.acl.made("aclrtCreateEvent")
        self.rank.acl.check("aclrtRecordEvent", event, self.streams[first])
        self.rank.acl.check("aclrtStreamWaitEvent", self.streams[then], event)

    def join(self, stream: int) -> float:
        self.rank.join(self.streams[stream])
        return self.now()

    @staticmethod
    def now() -> float:
        return round(ascend_emulator.now() * 1e6, 3)


def timed(program: Any) -> Program:
    """What it says, and its spans: [name, start, end] in microseconds."""

    def watched(rank: Rank) -> Any:
        watch = Watch(rank)
        with ascend_emulator.record_timeline() as spans:
            said = program(watch)
            rank.acl.check("aclrtSynchronizeDevice")
        return [said, [[span.name, *(round(at * 1e6, 3) for at in (span.start, span.end))] for span in spans]]

    return watched


@timed
def they_meet(watch: Watch) -> Any:
    """Rank 1 comes later. The collective ends for both at once."""
    if watch.rank.number == 1:
        watch.fill(0, 20 * BYTES)
    watch.reduce(0)
    return [watch.now(), watch.join(0)]


@timed
def beside_computing(watch: Watch) -> Any:
    """Two collectives, the second of which needs a result; and what is computed meanwhile."""
    watch.reduce(1)
    watch.fill(0, 10 * BYTES)
    watch.order(0, 1)
    watch.reduce(1)
    watch.fill(0, 10 * BYTES)
    watch.order(1, 0)
    watch.fill(0, BYTES)
    return watch.join(0)


@timed
def a_late_host(watch: Watch) -> Any:
    """How long a rank's process really takes for its calls means nothing; nor does whoever polls meanwhile."""
    time.sleep(0.2 * watch.rank.number)
    watch.reduce(0)
    polls = 0
    if watch.rank.number == 0:
        event = watch.rank.acl.made("aclrtCreateEvent")
        watch.rank.acl.check("aclrtRecordEvent", event, watch.streams[0])
        status = ctypes.c_int32(-1)
        while status.value != 1:
            watch.rank.acl.check("aclrtQueryEventStatus", event, ctypes.byref(status))
            polls += 1
    return [polls, watch.now()]


@timed
def sent(watch: Watch) -> Any:
    """Rank 0 computes, and sends."""
    rank = watch.rank
    if rank.number == 0:
        watch.fill(0, 5 * BYTES)
        rank.put("HcclSend", watch.block, FLOATS, FP32, 1, watch.group)
    else:
        rank.put("HcclRecv", watch.block, FLOATS, FP32, 0, watch.group)
    return watch.join(0)


@timed
def met_outside(watch: Watch) -> Any:
    """Rank 0 waits for the end before it lets rank 1, which has issued its part, go on."""
    if watch.rank.number == 1:
        watch.fill(0, 20 * BYTES)
    watch.reduce(0)
    if watch.rank.number == 0:
        watch.join(0)
    watch.rank.root([0, 1])  # any message will do
    return watch.join(0)


@timed
def received_early(watch: Watch) -> Any:
    """Rank 0 asks for rank 1's answer before it has sent what that answers."""
    rank, question, answer = watch.rank, watch.rank.acl.malloc(64), watch.rank.acl.malloc(64)
    back = rank.communicator()
    if rank.number == 0:
        rank.put("HcclRecv", answer, 4, FP32, 1, back, stream=watch.streams[1])
        for _ in range(5):
            watch.fill(0, BYTES)
        rank.put("HcclSend", question, 4, FP32, 1, watch.group)
    else:
        rank.put("HcclRecv", question, 4, FP32, 0, watch.group)
        watch.fill(0, BYTES)
        rank.join()
        rank.put("HcclSend", answer, 4, FP32, 0, back)
    return [watch.join(0), watch.join(1)]


@timed
def crossed(watch: Watch) -> Any:
    """Two communicators, twice each, in the opposite order, on streams of their own."""
    other = watch.rank.communicator()
    calls = [(1, watch.group), (1, watch.group), (2, other), (2, other)]
    for stream, group in calls if watch.rank.number else reversed(calls):
        watch.reduce(stream, 4000, group)
    return [watch.join(1), watch.join(2)]


@timed
def whatever(watch: Watch) -> Any:
    """A random program: the same collectives on all ranks, and other work on each."""
    shared, own = random.Random(0), random.Random(watch.rank.number)
    said = []
    for _ in range(150):
        for _ in range(own.randrange(3)):
            watch.fill(own.randrange(3), own.randrange(1, 20 * BYTES))
        if own.random() < 0.3:
            watch.order(own.randrange(3), own.randrange(3))
        if own.random() < 0.1:
            said.append(watch.join(own.randrange(3)))
        if shared.random() < 0.5:
            watch.reduce(1, 4 * shared.randrange(1, FLOATS))
        if shared.random() < 0.05:
            time.sleep(own.random() / 50)
    return said


PROGRAMS: dict[str, Program] = {
    "they_meet": they_meet,
    "beside_computing": beside_computing,
    "a_late_host": a_late_host,
    "sent": sent,
    "met_outside": met_outside,
    "received_early": received_early,
    "crossed": crossed,
    "whatever": whatever,
}


def run_all() -> dict[str, Any]:
    return {name: together(2, program, HCCL_BUFFSIZE="1") for name, program in PROGRAMS.items()}
