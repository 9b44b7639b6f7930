"""Suites that every implementation of a protocol is put through."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_mem.allocators import HostMemory, OutOfHostMemory, Region
from tiered_mem.policies import (
    Dropped,
    Event,
    Fetch,
    ForwardBegin,
    ForwardEnd,
    HostPressure,
    LayerBegin,
    LayerEnd,
    Offload,
    Policy,
    Release,
    Reload,
    Saved,
    Spill,
)


def check_host_memory(make: Callable[[], HostMemory]) -> None:
    """Put the `HostMemory` that `make` returns, which must have 16 MiB to give, through its protocol."""
    for check in (
        _memory_is_usable,
        _bad_sizes_are_refused,
        _foreign_and_freed_regions_are_refused,
        _impossible_requests_are_out_of_memory,
        _closing_with_live_regions_is_refused,
    ):
        memory = make()
        check(memory)
        memory.close()


def check_policy(make: Callable[[], Policy], min_layers: int = 0) -> None:
    """Tell the `Policy` that `make` returns of many histories, of models of `min_layers` layers and more.

    It never raises, and its actions only name blocks that are alive.
    """

    @settings(deadline=None)
    @given(policy_histories(min_layers))
    def check(history: list[Event]) -> None:
        policy = make()
        live: set[int] = set()
        for event in history:
            match event:
                case ForwardBegin(_, num_layers):
                    policy.check(num_layers)
                case Saved(_, _, key, _):
                    live.add(key)
                case Dropped(key):
                    live.remove(key)
            for action in policy.decide(event):
                assert isinstance(action, Offload | Release | Reload | Spill | Fetch)
                assert action.key in live, f"{action} after {event} names a block that is not alive"

    check()


@st.composite
def policy_histories(draw: st.DrawFn, min_layers: int = 0) -> list[Event]:
    """What a manager may tell a policy, until every forward has ended and every block is dropped.

    Up to four graphs at a time; layers in any order, more than were told, ended by exceptions or run twice; blocks
    shared by layers and graphs, or saved after their layer's end; backwards at any time, more than once, from any
    layer; host pressure at any time.
    """
    history: list[Event] = []
    keys = itertools.count()
    layers: list[int] = []  # of each graph
    running: dict[int, int | None] = {}  # the graphs in their forward, with the layer that is at work
    saving: dict[int, int] = {}  # the layer that began last
    live: list[int] = []
    for _ in range(draw(st.integers(0, 50))):
        step = draw(st.sampled_from(["forward", "begin", "save", "end", "over", "backward", "drop", "pressure"]))
        if step == "forward" and len(running) < 4:
            running[len(layers)] = None
            told = draw(st.integers(min_layers, min_layers + 4))
            history.append(ForwardBegin(len(layers), told))
            layers.append(told + draw(st.integers(0, 2)))
        elif step == "drop" and live:
            history.append(Dropped(live.pop(draw(st.integers(0, len(live) - 1)))))
        elif step == "pressure":
            history.append(HostPressure(draw(st.integers(1, 8))))
        elif step == "backward" and any(layers):
            graph = draw(st.sampled_from([g for g, n in enumerate(layers) if n]))
            history.append(LayerBegin(graph, draw(st.integers(0, layers[graph] - 1)), backward=True))
        elif running:
            graph = draw(st.sampled_from(list(running)))
            layer = running[graph]
            if step == "over":
                del running[graph]
                history.append(ForwardEnd(graph))
            elif step == "begin" and layers[graph]:
                running[graph] = saving[graph] = draw(st.integers(0, layers[graph] - 1))
                history.append(LayerBegin(graph, saving[graph]))
            elif step == "save" and graph in saving:
                key = draw(st.sampled_from([next(keys), *live]))
                if key not in live:
                    live.append(key)
                history.append(Saved(graph, saving[graph], key, nbytes=1 + key % 4))
            elif step == "end" and layer is not None:
                running[graph] = None
                history.append(LayerEnd(graph, layer))
    last: list[Event] = [*map(ForwardEnd, running), *map(Dropped, live)]
    return history + draw(st.permutations(last))


def write_ends(region: Region, value: int) -> None:
    """Fill the first and the last up to 64 bytes of a region with `value`."""
    ends = min(region.nbytes, 64)
    ctypes.memset(region.ptr, value, ends)
    ctypes.memset(region.ptr + region.nbytes - ends, value, ends)


def ends_hold(region: Region, value: int) -> bool:
    """Whether both ends of a region still hold what `write_ends` put there."""
    ends = min(region.nbytes, 64)
    first = ctypes.string_at(region.ptr, ends)
    last = ctypes.string_at(region.ptr + region.nbytes - ends, ends)
    return first == last == bytes([value]) * ends


def _memory_is_usable(memory: HostMemory) -> None:
    sizes = [1, 4095, 4096, 4097, 1 << 20, (1 << 20) + 1, 5 << 20]
    regions = [memory.allocate(size) for size in sizes]
    assert [region.nbytes for region in regions] == sizes
    assert [region.ptr % 4096 for region in regions] == [0] * len(sizes)
    for value, region in enumerate(regions, start=1):
        write_ends(region, value)
    for value, region in enumerate(regions, start=1):
        assert ends_hold(region, value), f"{region} was written to by another region"

    memory.deallocate(regions.pop(2))
    again = memory.allocate(2 << 20)
    write_ends(again, 99)
    assert all(ends_hold(region, value) for region, value in zip(regions, (1, 2, 4, 5, 6, 7), strict=True))
    for region in [again, *regions]:
        memory.deallocate(Region(region.ptr, region.nbytes))  # a region is a value: an equal one will do


def _bad_sizes_are_refused(memory: HostMemory) -> None:
    for nbytes in (0, -1, -4096):
        with pytest.raises(ValueError, match=str(nbytes)):
            memory.allocate(nbytes)


def _foreign_and_freed_regions_are_refused(memory: HostMemory) -> None:
    region = memory.allocate(8192)
    strangers = [Region(region.ptr + 4096, 4096), Region(region.ptr, 4096), Region(4096, 8192)]
    for stranger in strangers:
        with pytest.raises(ValueError, match=f"{stranger.nbytes} bytes at {stranger.ptr:#x}"):
            memory.deallocate(stranger)
    write_ends(region, 7)
    assert ends_hold(region, 7)
    memory.deallocate(region)
    with pytest.raises(ValueError, match=f"{region.ptr:#x}"):
        memory.deallocate(region)


def _impossible_requests_are_out_of_memory(memory: HostMemory) -> None:
    memory.deallocate(memory.allocate(1 << 20))
    held = memory.allocate(1 << 20)
    write_ends(held, 5)
    for nbytes in (1 << 60, (1 << 64) + 4096):  # the second one is 4096 where sizes are cut to 64 bits
        with pytest.raises(OutOfHostMemory, match=r"needed .* used 1\.0 MiB") as caught:
            memory.allocate(nbytes)
        assert caught.value.needed == nbytes
        assert caught.value.used == 1 << 20
    assert ends_hold(held, 5)
    after = memory.allocate(1 << 20)
    memory.deallocate(after)
    memory.deallocate(held)


def _closing_with_live_regions_is_refused(memory: HostMemory) -> None:
    region = memory.allocate(3 << 20)
    write_ends(region, 3)
    with pytest.raises(RuntimeError, match=rf"1 region of 3\.0 MiB.*{region.ptr:#x}"):
        memory.close()
    assert ends_hold(region, 3)
    memory.deallocate(region)
    memory.close()
    memory.close()
    with pytest.raises(RuntimeError, match="closed"):
        memory.allocate(4096)
