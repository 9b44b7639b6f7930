"""CANN's copies of many pairs by one call: what is refused, with which code, and what has been copied by then."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import ascend_emulator
import pytest

from emulator.tests.acl import (
    DEVICE,
    PINNED,
    TO_DEVICE,
    TO_HOST,
    Acl,
    Batch,
    BatchAttributes,
    Location,
    byte_at,
    fill,
)
from emulator.tests.emulated_device import Link

MB = 1_000_000
INVALID, RT_INVALID, NO_STREAM, LOST = 100000, 107000, 107003, 507010


@pytest.fixture
def acl() -> Iterator[Acl]:
    yield Acl()
    ascend_emulator.clear_faults()


class Memory:
    """Device and pinned memory with 64 bytes for each of three pairs; the pinned bytes are 1, the others 0."""

    def __init__(self, acl: Acl, device: int, host: int) -> None:
        self.acl, self.device, self.host = acl, device, host
        fill(device, 0, 4096)
        fill(host, 1, 4096)
        self.pairs = [(device + i, host + i, 64) for i in (0, 64, 128)]
        self.back = [(to, of, nbytes) for of, to, nbytes in self.pairs]

    def call(self, batch: Batch, stream: int) -> int:
        return self.acl.call("aclrtMemcpyBatchAsync", *batch.arguments, stream)

    def arrived(self) -> list[int]:
        return [byte_at(to) for to, _, _ in self.pairs]


@pytest.fixture
def memory(acl: Acl) -> Iterator[Memory]:
    with acl.buffers(4096) as (device, host):
        yield Memory(acl, device, host)


def attributes(to: tuple[int, int], of: tuple[int, int], reserved: int = 0) -> BatchAttributes:
    made = BatchAttributes(Location(*to), Location(*of))
    made.reserved[15] = reserved
    return made


NUMA = 4  # aclrtMemLocationType
WRONG = {
    "no pairs": (slice(0), [TO_DEVICE], [0], INVALID, None, "no pairs"),
    "reserved bytes": (slice(3), [attributes((0, 1), (0, 0), 1)], [0], INVALID, None, "reserved bytes"),
    "no attributes": (slice(3), [], [], RT_INVALID, None, "needs 1 attribute or more"),
    "more attributes than pairs": (slice(1), [TO_DEVICE] * 2, [0, 1], RT_INVALID, None, "at most one a pair"),
    "attributes from pair 1 on": (slice(3), [TO_DEVICE], [1], RT_INVALID, None, "the first for pair 0"),
    "attributes that do not rise": (slice(3), [TO_DEVICE] * 3, [0, 2, 2], RT_INVALID, None, "must rise"),
    "attributes for no pair": (slice(3), [TO_DEVICE] * 2, [0, 3], RT_INVALID, None, "must rise, and stay below"),
    "the direction turned round": (slice(3), [TO_HOST], [0], RT_INVALID, 0, "pair 0: the destination is not"),
    "another device": (slice(3), [attributes((1, DEVICE), (0, PINNED))], [0], RT_INVALID, 0, "the destination is"),
    "a source on the device": (
        *(slice(3), [TO_DEVICE, attributes((0, DEVICE), (0, DEVICE))], [0, 2]),
        *(RT_INVALID, 2, "pair 2: the source is not where"),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_refused_with_canns_code_and_the_pair(memory: Memory, case: str) -> None:
    pairs, attrs, first, code, failed, message = WRONG[case]
    for function, more in (("aclrtMemcpyBatchAsync", (0,)), ("aclrtMemcpyBatch", ())):
        batch = Batch(memory.pairs[pairs], attrs, first)
        assert memory.acl.call(function, *batch.arguments, *more) == code
        assert batch.failed == failed
        assert memory.acl.message().startswith(f"{function}: ")
        assert message in memory.acl.message()
    memory.acl.check("aclrtSynchronizeStream", 0)


def test_too_little_room_and_missing_arrays_are_refused_before_anything_is_copied(memory: Memory) -> None:
    batch = Batch(memory.pairs)
    batch.room[2] = 63
    assert memory.call(batch, 0) == INVALID
    assert "pair 2: more bytes than the destination has" in memory.acl.message()
    assert batch.failed is None
    for position in (0, 1, 2, 3, 5, 6, 8):
        passed = list(Batch(memory.pairs).arguments)
        passed[position] = 0
        assert memory.acl.call("aclrtMemcpyBatchAsync", *passed, 0) == INVALID
        assert "an array is missing" in memory.acl.message()
    assert memory.call(Batch(memory.pairs), 4096) == NO_STREAM
    memory.acl.check("aclrtSynchronizeStream", 0)
    assert memory.arrived() == [0, 0, 0]


def refused_pairs(memory: Memory) -> dict[str, tuple[int, int, int]]:
    doomed = memory.acl.malloc_host(64)
    memory.acl.check("aclrtFreeHost", doomed)
    return {
        "0 bytes": (memory.device + 64, memory.host + 64, 0),
        "an address is missing": (memory.device + 64, 0, 64),
        "memory that was freed": (memory.device + 64, doomed, 64),
        "the source is not where its attributes say": (memory.device + 64, memory.device, 64),
        "the destination is not where its attributes say": (memory.host + 64, memory.device, 64),
    }


def test_the_pairs_before_one_that_is_refused_are_on_their_way(memory: Memory) -> None:
    for reason, pair in refused_pairs(memory).items():
        fill(memory.device, 0, 4096)
        batch = Batch([memory.pairs[0], pair, memory.pairs[2]])
        assert memory.call(batch, 0) == RT_INVALID
        assert memory.acl.message() == f"aclrtMemcpyBatchAsync: pair 1: {reason}"
        assert batch.failed == 1
        memory.acl.check("aclrtSynchronizeStream", 0)
        assert memory.arrived() == [1, 0, 0]


def test_both_directions_in_one_batch_are_refused(memory: Memory) -> None:
    batch = Batch([*memory.pairs[:2], memory.back[2]], [TO_DEVICE, TO_HOST], [0, 2])
    assert memory.call(batch, 0) == RT_INVALID
    assert "pair 2: another direction than the first" in memory.acl.message()
    within = BatchAttributes(Location(0, DEVICE), Location(0, DEVICE))
    assert memory.call(Batch([(memory.device, memory.device + 64, 64)], [within]), 0) == RT_INVALID
    assert "pair 0: neither from host to device nor back" in memory.acl.message()
    memory.acl.check("aclrtSynchronizeStream", 0)


def test_each_attribute_is_that_of_the_pairs_from_its_index_on(memory: Memory) -> None:
    numa = attributes((0, DEVICE), (1, NUMA))  # the number of a host location does not matter
    batch = Batch(memory.pairs, [TO_DEVICE, numa], [0, 2])
    assert (memory.call(batch, 0), batch.failed) == (0, None)
    memory.acl.check("aclrtSynchronizeStream", 0)
    assert memory.arrived() == [1, 1, 1]


def test_pairs_in_pageable_memory_have_been_copied_when_the_call_returns(link: Link, acl: Acl) -> None:
    nbytes = MB
    pageable = (ctypes.c_uint8 * nbytes)()
    with acl.buffers(nbytes) as (device, host):
        fill(device, 7, nbytes)
        link("20MB/s")
        half, address = nbytes // 2, ctypes.addressof(pageable)
        batch = Batch([(address, device, half), (address + half, device + half, half)], [TO_HOST])
        acl.check("aclrtMemcpyBatchAsync", *batch.arguments, 0)
        assert bytes(pageable) == b"\x07" * nbytes
        acl.check("aclrtMemcpyBatch", *Batch([(host, device, nbytes)], [TO_HOST]).arguments)
        assert ctypes.string_at(host, nbytes) == b"\x07" * nbytes


def test_a_device_that_is_lost_in_a_batch_is_told_by_the_call(memory: Memory) -> None:
    ascend_emulator.inject("device:2")
    batch = Batch(memory.pairs)
    assert (memory.call(batch, 0), batch.failed) == (LOST, None)
    assert memory.call(Batch(memory.pairs), 0) == LOST
    ascend_emulator.clear_faults()
    memory.acl.check("aclrtSynchronizeStream", 0)
    assert memory.arrived()[1:] == [0, 0]


def test_a_waiting_batch_takes_at_most_4096_pairs(memory: Memory) -> None:
    many = [memory.pairs[0]] * 4097
    memory.acl.check("aclrtMemcpyBatch", *Batch(many[1:]).arguments)
    assert memory.acl.call("aclrtMemcpyBatch", *Batch(many).arguments) == RT_INVALID
    assert "more than 4096 pairs" in memory.acl.message()
    memory.acl.check("aclrtMemcpyBatchAsync", *Batch(many).arguments, 0)
    memory.acl.check("aclrtSynchronizeStream", 0)
