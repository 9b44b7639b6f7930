"""Small programs that race, and the same programs done right: memory that torch's allocator hands out again.

Each takes `right`; the line that makes the difference is the one that asks for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from emulator.tests.racing_streams import N, current, ones, pinned, side_stream


def handed_out_again(address: int, count: int = N) -> torch.Tensor:
    """A tensor of `count` numbers that nobody has used yet, there if the current stream can have that memory."""
    taken = [torch.empty(count, device="npu")]
    while taken[-1].data_ptr() != address and len(taken) < 64:
        taken.append(torch.empty(count, device="npu"))
    return taken[-1]


def freed_while_it_is_offloaded(right: bool) -> None:
    produced, host = ones() * 2, pinned()
    address = produced.data_ptr()
    side = side_stream()
    with torch.npu.stream(side):
        host.copy_(produced, non_blocking=True)
    if right:
        current().wait_stream(side)
    del produced
    handed_out_again(address).zero_()
    current().wait_stream(side)


def dropped_under_an_offload_and_used_again(right: bool) -> None:
    """Nobody minds when the memory was dropped, if it is not used again before the copy has ended."""
    produced, host = ones() * 2, pinned()
    address = produced.data_ptr()
    side = side_stream()
    with torch.npu.stream(side):
        host.copy_(produced, non_blocking=True)
    del produced
    if not right:
        handed_out_again(address).zero_()
    side.synchronize()
    handed_out_again(address).zero_()


def missing_record_stream(right: bool) -> None:
    produced = ones() * 2
    address = produced.data_ptr()
    side = side_stream()
    with torch.npu.stream(side):
        total = produced.sum()
    if right:
        produced.record_stream(side)
    del produced
    handed_out_again(address).zero_()
    current().wait_stream(side)
    del total


def temporary_of_a_side_stream_used_here(right: bool) -> None:
    side = side_stream()
    with torch.npu.stream(side):
        temporary = ones() * 2
    address = temporary.data_ptr()
    current().wait_stream(side)
    result = temporary + 1
    if right:
        temporary.record_stream(current())
    del temporary
    with torch.npu.stream(side):
        handed_out_again(address).zero_()
    side.synchronize()
    del result


def gradients_that_a_side_stream_makes(right: bool) -> None:
    """So FSDP2 does it: what reduce-scatter gives is used here, dropped, and made again on the same stream."""
    gathered = ones()
    reduce = side_stream()
    address = 0
    for _ in range(3):
        if right or address == 0:
            reduce.wait_stream(current())
        with torch.npu.stream(reduce):
            gradient = handed_out_again(address)
            gradient.copy_(gathered)
        address = gradient.data_ptr()
        current().wait_stream(reduce)
        gradient.mul_(2)
        del gradient
    current().wait_stream(reduce)


def handed_out_before_the_wait(right: bool) -> None:
    """Memory is used when it is used, not when it is handed out."""
    side = side_stream()
    with torch.npu.stream(side):
        first = ones()
    current().wait_stream(side)
    doubled = first * 2
    address = first.data_ptr()
    del first
    with torch.npu.stream(side):
        second = handed_out_again(address)
    if right:
        side.wait_stream(current())
    with torch.npu.stream(side):
        second.zero_()
    current().wait_stream(side)
    del doubled


def the_other_half_of_a_dropped_block(right: bool) -> None:
    produced, host = ones(), pinned()
    address = produced.data_ptr()
    half = slice(N // 2, N) if right else slice(0, N // 2)
    side = side_stream()
    with torch.npu.stream(side):
        host[half].copy_(produced[half], non_blocking=True)
    del produced
    handed_out_again(address, N // 2).zero_()
    current().wait_stream(side)


def second_tensor_used_on_a_third_stream(right: bool) -> None:
    produced, host = ones() * 2, pinned()
    address = produced.data_ptr()
    side, third = side_stream(), side_stream()
    with torch.npu.stream(side):
        host.copy_(produced, non_blocking=True)
    current().wait_stream(side)
    del produced
    second = handed_out_again(address)
    if right:
        third.wait_stream(current())
    with torch.npu.stream(third):
        second.zero_()
    current().wait_stream(third)


def prefetched_into_memory_that_is_still_read(right: bool) -> None:
    """Weights are reloaded into the copy stream's own memory, layer by layer."""
    hosts = [pinned(), pinned()]
    reload = side_stream()
    address = 0
    results = []
    for host in hosts:
        if right:
            reload.wait_stream(current())
        with torch.npu.stream(reload):
            weight = handed_out_again(address)
            weight.copy_(host, non_blocking=True)
        address = weight.data_ptr()
        current().wait_stream(reload)
        results.append(weight * 2)
        del weight


def reload_into_memory_that_is_still_read(right: bool) -> None:
    """What the allocator hands out on the compute stream may still be in use there."""
    host, source = pinned(), ones()
    address = source.data_ptr()
    side = side_stream()
    doubled = source * 2
    del source
    target = handed_out_again(address)
    if right:
        side.wait_stream(current())
    with torch.npu.stream(side):
        target.copy_(host, non_blocking=True)
    current().wait_stream(side)
    del doubled


def reload_unread_and_dropped(right: bool) -> None:
    host = pinned()
    side = torch.npu.Stream()
    target = torch.empty(N, device="npu")
    address = target.data_ptr()
    side.wait_stream(current())
    with torch.npu.stream(side):
        target.copy_(host, non_blocking=True)
    if right:
        current().wait_stream(side)
    del target
    handed_out_again(address).zero_()
    current().wait_stream(side)


REUSE_PROGRAMS: dict[str, Callable[[bool], None]] = {
    program.__name__: program
    for program in (
        freed_while_it_is_offloaded,
        dropped_under_an_offload_and_used_again,
        missing_record_stream,
        temporary_of_a_side_stream_used_here,
        gradients_that_a_side_stream_makes,
        handed_out_before_the_wait,
        the_other_half_of_a_dropped_block,
        second_tensor_used_on_a_third_stream,
        prefetched_into_memory_that_is_still_read,
        reload_into_memory_that_is_still_read,
        reload_unread_and_dropped,
    )
}
