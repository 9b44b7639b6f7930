"""Small programs that race, and the same programs done right: host buffers, and memory of the runtime.

Each takes `right`; the line that makes the difference is the one that asks for it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import torch
from ascend_emulator import host_access

from emulator.tests.acl import D2H, H2D, Acl
from emulator.tests.racing_streams import NBYTES, current, ones, pinned, side_stream


def host_buffer_given_to_a_second_offload(right: bool) -> None:
    first, second, host = ones(), ones(), pinned()
    one, other = side_stream(), side_stream()
    with torch.npu.stream(one):
        host.copy_(first, non_blocking=True)
    if right:
        other.wait_stream(one)
    with torch.npu.stream(other):
        host.copy_(second, non_blocking=True)
    current().wait_stream(one)
    current().wait_stream(other)


def host_buffer_refilled_while_it_is_reloaded(right: bool) -> None:
    host, target = pinned(), ones()
    target.copy_(host, non_blocking=True)
    if right:
        current().synchronize()
    host.fill_(7)


def host_buffer_read_before_synchronising(right: bool) -> None:
    source, host = ones(), pinned()
    host.copy_(source, non_blocking=True)
    if right:
        current().synchronize()
    host.sum()


def third_transfer_through_two_buffers(right: bool) -> None:
    buffers, sources = [pinned(), pinned()], [ones() for _ in range(3)]
    sides = [side_stream() for _ in range(3)]
    for i, (source, side) in enumerate(zip(sources, sides, strict=True)):
        if right and i >= 2:
            side.wait_stream(sides[i - 2])
        with torch.npu.stream(side):
            buffers[i % 2].copy_(source, non_blocking=True)
    for side in sides:
        current().wait_stream(side)


def spill_thread_reads_before_the_offload_ended(right: bool) -> None:
    source, host = ones(), pinned()
    host.copy_(source, non_blocking=True)
    done = current().record_event()

    def spill() -> None:
        if right:
            done.synchronize()
        with host_access(host.data_ptr(), NBYTES, write=False, what="spill"):
            ctypes.string_at(host.data_ptr(), NBYTES)

    thread = threading.Thread(target=spill)
    thread.start()
    thread.join()


def slot_given_away_while_it_is_spilled(right: bool) -> None:
    source, host = ones(), pinned()
    with host_access(host.data_ptr(), NBYTES, write=False, what="spill"):
        if not right:
            host.copy_(source, non_blocking=True)
    host.copy_(source, non_blocking=True)


def read_from_disk_into_a_slot_that_is_still_offloaded_from(right: bool) -> None:
    host, target = pinned(), ones()
    target.copy_(host, non_blocking=True)
    if right:
        current().synchronize()
    with host_access(host.data_ptr(), NBYTES, write=True, what="file read"):
        ctypes.memset(host.data_ptr(), 1, NBYTES)


def pinned_memory_freed_in_flight(right: bool) -> None:
    acl = Acl()
    device, host = acl.malloc(NBYTES), acl.malloc_host(NBYTES)
    with acl.streams(1) as (stream,):
        acl.copy(H2D, device, host, NBYTES, stream)
        if right:
            acl.check("aclrtSynchronizeStream", stream)
        acl.check("aclrtFreeHost", host)
    acl.check("aclrtFree", device)


def registration_ended_in_flight(right: bool) -> None:
    acl = Acl()
    memory = ctypes.create_string_buffer(NBYTES + 4096)
    host = -(-ctypes.addressof(memory) // 4096) * 4096
    acl.check("aclrtHostRegisterV2", host, NBYTES, 0)
    device = acl.malloc(NBYTES)
    with acl.streams(1) as (stream,):
        acl.copy(H2D, device, host, NBYTES, stream)
        if right:
            acl.check("aclrtSynchronizeStream", stream)
        acl.check("aclrtHostUnregister", host)
    acl.check("aclrtFree", device)


def device_memory_freed_in_flight(right: bool) -> None:
    acl = Acl()
    device, host = acl.malloc(NBYTES), acl.malloc_host(NBYTES)
    with acl.streams(1) as (stream,):
        acl.copy(D2H, host, device, NBYTES, stream)
        if right:
            acl.check("aclrtSynchronizeDevice")
        acl.check("aclrtFree", device)
    acl.check("aclrtFreeHost", host)


def blocking_copy_beside_a_stream(right: bool) -> None:
    """aclrtMemcpy waits for its own end, not for what streams do."""
    acl = Acl()
    device, host = acl.malloc(NBYTES), acl.malloc_host(NBYTES)
    with acl.streams(1) as (stream,):
        acl.check("aclrtMemsetAsync", device, NBYTES, 1, NBYTES, stream)
        if right:
            acl.check("aclrtSynchronizeStream", stream)
        acl.check("aclrtMemcpy", host, NBYTES, device, NBYTES, D2H)
    acl.check("aclrtFree", device)
    acl.check("aclrtFreeHost", host)


MEMORY_PROGRAMS: dict[str, Callable[[bool], None]] = {
    program.__name__: program
    for program in (
        host_buffer_given_to_a_second_offload,
        host_buffer_refilled_while_it_is_reloaded,
        host_buffer_read_before_synchronising,
        third_transfer_through_two_buffers,
        spill_thread_reads_before_the_offload_ended,
        slot_given_away_while_it_is_spilled,
        read_from_disk_into_a_slot_that_is_still_offloaded_from,
        pinned_memory_freed_in_flight,
        registration_ended_in_flight,
        device_memory_freed_in_flight,
        blocking_copy_beside_a_stream,
    )
}
