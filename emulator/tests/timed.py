"""A modelled machine with round figures, and small programs on it that tell what time it was."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ascend_emulator

from emulator.tests.acl import D2D, D2H, H2D, TO_DEVICE, Acl, Batch, byte_at, fill

CHIP = """
server = "atlas-a2"
[launch]
matrix_us = 10
vector_us = 4
[matrix]
bfloat16 = 10e12
float16 = 20e12
float32 = 5e12
matmul_shares = [[100, 0.5], [300, 1.0]]
attention_shares = [[16, 0.2], [48, 0.6]]
convolution_share = 0.2
[memory]
bytes_per_s = 1e12
share = 0.5
softmax_share = 0.25
[step]
factor = 1
[host]
issue_us = 20
operator_us = 3
event_us = 5
query_us = 1
wait_us = 30
"""
SERVER = """
[link]
h2d_bytes_per_s = 10e9
d2h_bytes_per_s = 20e9
h2d_beside_d2h = 0.5
d2h_beside_h2d = 0.75
pageable_share = 0.5
latency_us = 6
[cards]
ring_bytes_per_s = 30e9
pair_bytes_per_s = 20e9
start_us = 12
[drives]
read_bytes_per_s = 2e9
write_bytes_per_s = 1e9
latency_us = 50
"""
NBYTES = 1_000_000  # 100 us to the device, 50 us back
ROOM = 10 * NBYTES

Said = dict[str, Any]


def machine(folder: Path, server: str = SERVER) -> tuple[str, ...]:
    """The launcher's options for that machine, whose files are put into the folder."""
    (folder / "chip.toml").write_text(CHIP)
    (folder / "server.toml").write_text(server)
    return ("--clock", "chip.toml", "--server", "server.toml")


class Bench:
    """Two devices' memory, pinned memory, and streams, with a watch that starts when it is told to."""

    def __init__(self) -> None:
        self.acl = Acl()
        self.host, self.device = self.acl.malloc_host(ROOM), self.acl.malloc(ROOM)
        self.other_host, self.other = self.acl.malloc_host(ROOM), self.acl.malloc(3 * ROOM)
        self.streams = [self.acl.made("aclrtCreateStream") for _ in range(3)]
        self._start = 0.0

    def start(self) -> None:
        self.acl.check("aclrtSynchronizeDevice")
        self._start = ascend_emulator.now()

    def at(self, seconds: float) -> float:
        """Microseconds since the start."""
        return round((seconds - self._start) * 1e6, 3)

    def now(self) -> float:
        return self.at(ascend_emulator.now())

    # Each stream has bytes of its own.
    def up(self, stream: int, nbytes: int = NBYTES) -> None:
        self.acl.copy(H2D, self.device + stream * NBYTES, self.host, nbytes, self.streams[stream])

    def down(self, stream: int, nbytes: int = NBYTES) -> None:
        place = stream * NBYTES
        self.acl.copy(D2H, self.other_host + place, self.other + stream * ROOM, nbytes, self.streams[stream])

    def fill(self, stream: int, nbytes: int) -> None:
        self.acl.check("aclrtMemsetAsync", self.other + stream * ROOM, ROOM, 1, nbytes, self.streams[stream])

    def record(self, stream: int) -> int:
        event = self.acl.made("aclrtCreateEvent")
        self.acl.check("aclrtRecordEvent", event, self.streams[stream])
        return event

    def wait(self, stream: int, event: int) -> None:
        self.acl.check("aclrtStreamWaitEvent", self.streams[stream], event)

    def join(self, stream: int) -> None:
        self.acl.check("aclrtSynchronizeStream", self.streams[stream])

    def elapsed_us(self, first: int, last: int) -> float | str:
        milliseconds = ctypes.c_float()
        if self.acl.call("aclrtEventElapsedTime", ctypes.byref(milliseconds), first, last):
            return self.acl.message()
        return round(milliseconds.value * 1e3, 3)

    def polls(self, function: str, handle: int, done: int) -> int:
        """How often that function is asked until it says so."""
        status = ctypes.c_int32(-1)
        asked = 0
        while status.value != done:
            self.acl.check(function, handle, ctypes.byref(status))
            asked += 1
        return asked


def a_copy_each_way(bench: Bench) -> Said:
    bench.up(0)
    issued = bench.now()
    bench.join(0)
    arrived = bench.now()
    bench.down(0)
    bench.join(0)
    return {"issued": issued, "arrived": arrived}


def both_ways_at_once(bench: Bench) -> Said:
    bench.up(0)
    bench.down(1)
    return {}


def two_copies_one_way(bench: Bench) -> Said:
    bench.up(0)
    bench.up(1)
    return {}


def work_on_the_device(bench: Bench) -> Said:
    bench.fill(0, NBYTES)
    bench.acl.copy(D2D, bench.device, bench.other, NBYTES, bench.streams[0])
    return {}


def events(bench: Bench) -> Said:
    first = bench.record(0)
    bench.up(0)
    last = bench.record(0)
    early = bench.elapsed_us(first, last)
    bench.acl.check("aclrtSynchronizeEvent", last)
    now = bench.now()
    bench.acl.check("aclrtSynchronizeEvent", first)
    return {"early": early, "elapsed": bench.elapsed_us(first, last), "now": now, "again": bench.now()}


def computing_beside_a_copy(bench: Bench) -> Said:
    bench.fill(0, ROOM)
    bench.up(1)
    bench.fill(2, ROOM)
    return {}


def a_stream_that_waits(bench: Bench) -> Said:
    bench.up(0)
    bench.wait(1, bench.record(0))
    bench.fill(1, NBYTES)
    bench.fill(2, NBYTES)
    return {}


def many_small_operations(bench: Bench) -> Said:
    for _ in range(5):
        bench.fill(0, 500)
    bench.join(0)
    return {"now": bench.now()}


def few_large_operations(bench: Bench) -> Said:
    for _ in range(3):
        bench.fill(0, ROOM)
    return {}


def polling_an_event(bench: Bench) -> Said:
    fill(bench.host, 7, NBYTES)
    fill(bench.device, 1, NBYTES)  # as the copy must find it
    bench.up(0)
    polls = bench.polls("aclrtQueryEventStatus", bench.record(0), done=1)
    return {"polls": polls, "now": bench.now(), "last byte": byte_at(bench.device + NBYTES - 1)}


def polling_a_stream(bench: Bench) -> Said:
    bench.up(0)
    return {"polls": bench.polls("aclrtStreamQuery", bench.streams[0], done=0), "now": bench.now()}


def copies_that_wait(bench: Bench) -> Said:
    bench.acl.check("aclrtMemcpy", bench.device, ROOM, bench.host, NBYTES, H2D)
    pinned = bench.now()
    pageable = (ctypes.c_uint8 * NBYTES)()
    bench.acl.check("aclrtMemcpy", bench.device, ROOM, ctypes.addressof(pageable), NBYTES, H2D)
    synchronous = bench.now()
    bench.acl.copy(H2D, bench.device, ctypes.addressof(pageable), NBYTES, bench.streams[0])
    return {"pinned": pinned, "pageable": synchronous, "asynchronous": bench.now()}


def many_copies_by_one_call(bench: Bench) -> Said:
    pairs = [(bench.device + i * NBYTES, bench.host + i * NBYTES, NBYTES) for i in range(3)]
    batch = Batch(pairs, [TO_DEVICE])
    bench.acl.check("aclrtMemcpyBatchAsync", *batch.arguments, bench.streams[0])
    issued = bench.now()
    bench.join(0)
    start = bench.now()
    bench.acl.check("aclrtMemcpyBatch", *batch.arguments)
    return {"issued": issued, "waited": round(bench.now() - start, 3)}


def another_rate(bench: Bench) -> Said:
    ascend_emulator.configure(h2d_bytes_per_s="100KB/s")
    start = time.perf_counter()
    bench.up(0)
    bench.join(0)
    slept = time.perf_counter() - start >= 10
    ascend_emulator.configure(h2d_bytes_per_s=0)
    bench.up(0)
    return {"slept": slept}


def waits_for_nothing(bench: Bench) -> Said:
    bench.join(0)
    stream = bench.now()
    bench.acl.check("aclrtSynchronizeDevice")
    return {"stream": stream, "device": bench.now()}


def two_devices(bench: Bench) -> Said:
    """Each has a link and an engine of its own."""
    bench.fill(0, ROOM)
    bench.up(1)
    bench.acl.check("aclrtSetDevice", 1)
    stream, device = bench.acl.made("aclrtCreateStream"), bench.acl.malloc(ROOM)
    bench.acl.check("aclrtMemsetAsync", device, ROOM, 0, ROOM, stream)
    bench.acl.copy(H2D, device, bench.other_host, NBYTES, stream)
    bench.acl.check("aclrtSynchronizeDevice")
    bench.acl.check("aclrtSetDevice", 0)
    return {}


def replays_of_a_graph(bench: Bench) -> Said:
    """A copy beside a fill, and then a copy back; captured, and replayed twice on another stream."""
    graph = ctypes.c_size_t()
    bench.acl.check("aclmdlRICaptureBegin", bench.streams[0], 0)
    bench.wait(1, bench.record(0))
    bench.up(0)
    bench.fill(1, ROOM)
    bench.wait(0, bench.record(1))
    bench.down(0)
    bench.acl.check("aclmdlRICaptureEnd", bench.streams[0], ctypes.byref(graph))
    times = [bench.now()]
    for _ in range(2):
        bench.acl.check("aclmdlRIExecuteAsync", graph.value, bench.streams[2])
        times.append(bench.now())
    bench.join(2)
    bench.acl.check("aclmdlRIDestroy", graph.value)
    return {"times": [*times, bench.now()]}


def whatever(bench: Bench) -> Said:
    """A random program. It says for each stream its operations: [name, issued at, what it waits for].

    What it waits for is a list of [stream, how many of that one's operations].
    """
    draw = random.Random(0)
    issued: list[list[list[Any]]] = [[], [], []]
    waits: list[list[list[int]]] = [[], [], []]
    for _ in range(300):
        stream, other = draw.randrange(3), draw.randrange(3)
        choice = draw.random()
        if choice < 0.2:
            waits[stream].append([other, len(issued[other])])
            bench.wait(stream, bench.record(other))
        elif choice < 0.25:
            bench.join(stream)
        else:
            name, run = draw.choice([("copy_h2d", bench.up), ("copy_d2h", bench.down), ("memset", bench.fill)])
            run(stream, draw.randrange(1, NBYTES))
            issued[stream].append([name, bench.now(), waits[stream]])
            waits[stream] = []
    return {"issued": issued}


PROGRAMS: dict[str, Callable[[Bench], Said]] = {
    program.__name__: program
    for program in (
        a_copy_each_way,
        both_ways_at_once,
        two_copies_one_way,
        work_on_the_device,
        events,
        computing_beside_a_copy,
        a_stream_that_waits,
        many_small_operations,
        few_large_operations,
        polling_an_event,
        polling_a_stream,
        copies_that_wait,
        many_copies_by_one_call,
        another_rate,
        waits_for_nothing,
        two_devices,
        replays_of_a_graph,
        whatever,
    )
}


def run_all(programs: dict[str, Callable[[Bench], Said]] = PROGRAMS) -> dict[str, Said]:
    """What each program said, and its spans: [name, start, end]."""
    bench = Bench()
    said = {}
    for name, program in programs.items():
        with ascend_emulator.record_timeline() as spans:
            bench.start()
            said[name] = program(bench)
            bench.acl.check("aclrtSynchronizeDevice")
        said[name]["spans"] = [[span.name, bench.at(span.start), bench.at(span.end)] for span in spans]
        said[name]["streams"] = [span.stream for span in spans]
    return said
