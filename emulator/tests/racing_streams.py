"""Small programs that race, and the same programs done right: waits and events.

Each takes `right`; the line that makes the difference is the one that asks for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

N = 1 << 16
NBYTES = 4 * N


def ones() -> torch.Tensor:
    return torch.ones(N, device="npu")


def pinned() -> torch.Tensor:
    return torch.zeros(N).pin_memory()


def current() -> torch.npu.Stream:
    return torch.npu.current_stream()


def side_stream() -> torch.npu.Stream:
    """A stream that knows of everything so far."""
    side = torch.npu.Stream()
    side.wait_stream(current())
    return side


def offload_before_the_producer_is_done(right: bool) -> None:
    side, host = side_stream(), pinned()
    produced = ones() * 2
    if right:
        side.wait_stream(current())
    with torch.npu.stream(side):
        host.copy_(produced, non_blocking=True)
    current().wait_stream(side)


def wait_inside_with_stream(right: bool) -> None:
    """Inside, the current stream is the side stream itself."""
    side, host = side_stream(), pinned()
    produced = ones() * 2
    compute = current()
    with torch.npu.stream(side):
        side.wait_stream(compute if right else current())
        host.copy_(produced, non_blocking=True)
    compute.wait_stream(side)


def ready_event_that_is_too_old(right: bool) -> None:
    side, host = side_stream(), pinned()
    produced = ones()
    ready = current().record_event()
    produced.mul_(2)
    if right:
        ready = current().record_event()
    side.wait_event(ready)
    with torch.npu.stream(side):
        host.copy_(produced, non_blocking=True)
    current().wait_stream(side)


def ready_event_of_the_wrong_stream(right: bool) -> None:
    side, other, host = side_stream(), side_stream(), pinned()
    produced = ones() * 2
    ready = (current() if right else other).record_event()
    side.wait_event(ready)
    with torch.npu.stream(side):
        host.copy_(produced, non_blocking=True)
    current().wait_stream(side)


def wait_on_the_wrong_stream(right: bool) -> None:
    side, other, host = side_stream(), side_stream(), pinned()
    produced = ones() * 2
    (side if right else other).wait_stream(current())
    with torch.npu.stream(side):
        host.copy_(produced, non_blocking=True)
    current().wait_stream(side)


def event_recorded_before_the_copy(right: bool) -> None:
    side, host, target = side_stream(), pinned(), ones()
    side.wait_stream(current())
    if not right:
        landed = side.record_event()
    with torch.npu.stream(side):
        target.copy_(host, non_blocking=True)
    if right:
        landed = side.record_event()
    current().wait_event(landed)
    target.mul_(2)
    current().wait_stream(side)


def reload_used_before_it_arrived(right: bool) -> None:
    host, target = pinned(), ones()
    side = side_stream()
    with torch.npu.stream(side):
        target.copy_(host, non_blocking=True)
    if right:
        current().wait_stream(side)
    doubled = target * 2
    current().wait_stream(side)
    del doubled


def reload_before_its_own_offload_ended(right: bool) -> None:
    source, target, host = ones(), ones(), pinned()
    to_host, to_device = side_stream(), side_stream()
    with torch.npu.stream(to_host):
        host.copy_(source, non_blocking=True)
    if right:
        to_device.wait_stream(to_host)
    with torch.npu.stream(to_device):
        target.copy_(host, non_blocking=True)
    current().wait_stream(to_host)
    current().wait_stream(to_device)


def changed_while_it_is_offloaded(right: bool) -> None:
    source, host = ones(), pinned()
    side = side_stream()
    with torch.npu.stream(side):
        host.copy_(source, non_blocking=True)
    if right:
        current().wait_stream(side)
    source.add_(1)
    current().wait_stream(side)


def asked_and_not_waited(right: bool) -> None:
    source, host = ones(), pinned()
    side = side_stream()
    with torch.npu.stream(side):
        for _ in range(8):
            host.copy_(source, non_blocking=True)
    done = side.record_event()
    if right:
        while not done.query():
            pass
    else:
        current().query()
    host.sum()
    current().wait_stream(side)


def two_streams_accumulate(right: bool) -> None:
    gradient = ones()
    side = side_stream()
    gradient.add_(1)
    if right:
        side.wait_stream(current())
    with torch.npu.stream(side):
        gradient.add_(1)
    current().wait_stream(side)


def optimizer_steps_beside_backward(right: bool) -> None:
    weight = torch.nn.Parameter(ones())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    side = side_stream()
    (weight * 2).sum().backward()
    if right:
        side.wait_stream(current())
    with torch.npu.stream(side):
        optimizer.step()
    current().wait_stream(side)
    optimizer.zero_grad()


def columns_of_one_matrix(right: bool) -> None:
    """Streams may share a tensor where their bytes are not the same."""
    matrix = torch.zeros(16, 64, device="npu")
    side = side_stream()
    matrix[:, :32].add_(1)
    with torch.npu.stream(side):
        matrix[:, 32 if right else 31 :].add_(1)
    current().wait_stream(side)


STREAM_PROGRAMS: dict[str, Callable[[bool], None]] = {
    program.__name__: program
    for program in (
        offload_before_the_producer_is_done,
        wait_inside_with_stream,
        ready_event_that_is_too_old,
        ready_event_of_the_wrong_stream,
        wait_on_the_wrong_stream,
        event_recorded_before_the_copy,
        reload_used_before_it_arrived,
        reload_before_its_own_offload_ended,
        changed_while_it_is_offloaded,
        asked_and_not_waited,
        two_streams_accumulate,
        optimizer_steps_beside_backward,
        columns_of_one_matrix,
    )
}
