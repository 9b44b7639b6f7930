"""The host link: how long copies take, what they cost, and what runs beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import ascend_emulator
import pytest
import torch

from emulator.tests.acl import D2D, D2H, H2D, Acl, byte_at
from emulator.tests.launch import EMULATOR, run, write_script

MB = 1_000_000
NBYTES = 20 * MB

pytestmark = [
    pytest.mark.schedules("eager", why="what runs beside what is the schedule's choice"),
    pytest.mark.once(why="its only schedule is make test's"),
]


class Buffers:
    """A pinned and a device buffer of NBYTES, with a stream of their own for copies between them."""

    def __init__(self) -> None:
        self.host = torch.zeros(NBYTES, dtype=torch.uint8).pin_memory()
        self.device = torch.ones(NBYTES, dtype=torch.uint8, device="npu")
        self.stream = torch.npu.Stream()
        torch.npu.synchronize()

    def start(self, direction: str) -> None:
        with torch.npu.stream(self.stream):
            if direction == "h2d":
                self.device.copy_(self.host, non_blocking=True)
            else:
                self.host.copy_(self.device, non_blocking=True)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_copy_takes_the_time_that_the_link_needs_and_little_cpu(
    link: Callable[[str], None], direction: str
) -> None:
    link("100MB/s")
    buffers = Buffers()
    wall, cpu = time.perf_counter(), time.process_time()
    buffers.start(direction)
    buffers.stream.synchronize()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert wall >= 0.2
    assert cpu < wall / 2


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_copies_in_one_direction_share_the_bandwidth(link: Callable[[str], None], direction: str) -> None:
    link("100MB/s")
    pair = (Buffers(), Buffers())
    start = time.perf_counter()
    for buffers in pair:
        buffers.start(direction)
    torch.npu.synchronize()
    assert time.perf_counter() - start >= 0.4


def test_opposite_directions_run_at_the_same_time(link: Callable[[str], None]) -> None:
    link("50MB/s")
    up, down = Buffers(), Buffers()
    up.start("h2d")
    down.start("d2h")
    while byte_at(down.host.data_ptr()) == 0:
        pass
    assert not up.stream.query()
    torch.npu.synchronize()


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_the_call_returns_at_once_for_pinned_memory(link: Callable[[str], None], direction: str) -> None:
    link("50MB/s")
    buffers = Buffers()
    buffers.start(direction)
    assert not buffers.stream.query()
    buffers.stream.synchronize()
    assert buffers.stream.query()


def test_a_copy_arrives_piece_by_piece(link: Callable[[str], None]) -> None:
    link("50MB/s")
    buffers = Buffers()
    buffers.start("d2h")
    first, last = buffers.host.data_ptr(), buffers.host.data_ptr() + NBYTES - 1
    while byte_at(first) == 0:
        pass
    assert byte_at(last) == 0
    buffers.stream.synchronize()
    assert byte_at(last) == 1


@pytest.mark.parametrize(("direction", "kind"), [("h2d", H2D), ("d2h", D2H)])
def test_an_asynchronous_copy_of_pageable_memory_blocks(
    acl: Acl, link: Callable[[str], None], direction: str, kind: int
) -> None:
    link("100MB/s")
    device, pageable = Buffers().device, torch.zeros(NBYTES, dtype=torch.uint8)
    ends = [device.data_ptr(), pageable.data_ptr()]
    target, source = ends if direction == "h2d" else reversed(ends)
    with acl.streams(1) as (stream,):
        start = time.perf_counter()
        acl.copy(kind, target, source, NBYTES, stream)
        assert time.perf_counter() - start >= 0.2
    assert device.cpu().equal(pageable)


def test_a_synchronous_copy_crosses_the_link_too(link: Callable[[str], None], device: str) -> None:
    link("100MB/s")
    start = time.perf_counter()
    torch.zeros(NBYTES, dtype=torch.uint8).to(device)
    assert time.perf_counter() - start >= 0.2


def test_copies_within_the_device_do_not_cross_the_link(acl: Acl, link: Callable[[str], None]) -> None:
    source = Buffers().device
    target = torch.zeros_like(source)
    torch.npu.synchronize()
    link("1KB/s")  # it would take five hours
    acl.copy(D2D, target.data_ptr(), source.data_ptr(), NBYTES, 0)
    acl.check("aclrtSynchronizeStream", 0)
    link("0")
    assert target.cpu().equal(source.cpu())


def test_the_rate_can_be_changed_and_taken_off() -> None:
    buffers = Buffers()
    took = []
    for rate in ("40MB/s", 80 * MB):
        ascend_emulator.configure(h2d_bytes_per_s=rate)
        start = time.perf_counter()
        buffers.start("h2d")
        buffers.stream.synchronize()
        took.append(time.perf_counter() - start)
    assert took[0] >= 0.5
    assert took[1] >= 0.25
    ascend_emulator.configure(h2d_bytes_per_s="1KB/s")  # with which a copy would take five hours
    ascend_emulator.configure(h2d_bytes_per_s=0)
    buffers.start("h2d")
    buffers.stream.synchronize()


COPY_BOTH_WAYS = """
    import ctypes, time
    acl, nbytes = ctypes.CDLL("libascendcl.so"), ctypes.c_size_t(4_000_000)
    device, host = ctypes.c_void_p(), ctypes.c_void_p()
    assert acl.aclrtMalloc(ctypes.byref(device), nbytes, 0) == 0
    assert acl.aclrtMallocHost(ctypes.byref(host), nbytes) == 0
    for to, source, kind in ((device, host, 1), (host, device, 2)):
        start = time.perf_counter()
        assert acl.aclrtMemcpy(to, nbytes, source, nbytes, kind) == 0
        print(time.perf_counter() - start)
"""


@pytest.mark.parametrize(("option", "slow"), [("--h2d", 0), ("--d2h", 1)])
def test_rates_of_the_launcher(tmp_path: Path, option: str, slow: int) -> None:
    done = run(*EMULATOR, option, "4MB/s", write_script(tmp_path, COPY_BOTH_WAYS), cwd=tmp_path)
    times = [float(line) for line in done.stdout.split()]
    assert times[1 - slow] < 1 <= times[slow]


def test_a_rate_that_is_not_given_is_not_the_parents(tmp_path: Path) -> None:
    script = write_script(tmp_path, COPY_BOTH_WAYS)
    done = run(*EMULATOR, script, cwd=tmp_path, ASCEND_EMULATOR_H2D_BYTES_PER_S="1000")
    assert len(done.stdout.split()) == 2, "the copies would take more than an hour"
