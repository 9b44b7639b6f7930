"""Small programs that race, and the same programs done right: replays of graphs.

Each takes `right`; the line that makes the difference is the one that asks for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from emulator.tests.racing_streams import current, ones, pinned, side_stream


def captured(work: Callable[[], object]) -> torch.npu.NPUGraph:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        work()
    return graph


def replay_beside_a_write_of_what_it_reads(right: bool) -> None:
    source, result = ones(), ones()
    graph = captured(lambda: result.copy_(source * 2))
    side = side_stream()
    with torch.npu.stream(side):
        source.fill_(3)
    if right:
        current().wait_stream(side)
    graph.replay()
    current().wait_stream(side)


def result_read_beside_the_second_replay(right: bool) -> None:
    source, result = ones(), ones()
    graph = captured(lambda: result.copy_(source * 2))
    graph.replay()
    side, host = side_stream(), pinned()
    with torch.npu.stream(side):
        host.copy_(result, non_blocking=True)
    if right:
        current().wait_stream(side)
    graph.replay()
    current().wait_stream(side)


def host_buffer_refilled_beside_a_replay(right: bool) -> None:
    host, target = pinned(), ones()
    graph = captured(lambda: target.copy_(host, non_blocking=True))
    graph.replay()
    if right:
        current().synchronize()
    host.fill_(3)


def replays_of_two_graphs_on_two_streams(right: bool) -> None:
    value = ones()
    first, second = captured(lambda: value.add_(1)), captured(lambda: value.mul_(2))
    side = side_stream()
    with torch.npu.stream(side):
        first.replay()
    if right:
        current().wait_stream(side)
    second.replay()
    current().wait_stream(side)


def stream_of_a_graph_that_does_not_wait(right: bool) -> None:
    """The stream beside has joined the capture by an event from before what it reads."""
    source, result, copied = ones(), ones(), ones()
    side = side_stream()

    def work() -> None:
        side.wait_stream(current())
        result.copy_(source * 2)
        if right:
            side.wait_stream(current())
        with torch.npu.stream(side):
            copied.copy_(result)
        current().wait_stream(side)

    graph = captured(work)
    graph.replay()


GRAPH_PROGRAMS: dict[str, Callable[[bool], None]] = {
    program.__name__: program
    for program in (
        replay_beside_a_write_of_what_it_reads,
        result_read_beside_the_second_replay,
        host_buffer_refilled_beside_a_replay,
        replays_of_two_graphs_on_two_streams,
        stream_of_a_graph_that_does_not_wait,
    )
}
