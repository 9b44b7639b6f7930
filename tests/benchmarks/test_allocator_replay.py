"""The traces that the replay benchmark makes and reads, and what it counts, by figures worked out by hand."""

from __future__ import annotations

import io

import pytest

from benchmarks.allocation_traces import (
    QWEN_7B,
    STEPS,
    Shape,
    free_lengths,
    generated_traces,
    leases_for,
    training,
)
from benchmarks.allocator_replay import (
    RECORDED,
    CachingPool,
    CountingSource,
    Figures,
    count,
    in_advance,
    load,
    power_of_two,
    round_up,
    slab_pool,
    traces,
)
from benchmarks.recorded import Allocated, Deallocated, Marked, Operation, read_trace
from tiered_mem.allocators import SlabPool

pytestmark = pytest.mark.once(why="it needs no device")

MIB = 1 << 20

# Live at most: 12288 bytes in step 0, 20480 in step 4, 28672 in step 1.
TINY = """allocation-trace 1
mark step 0
allocate 0 8192
allocate 1 4096
deallocate 1
deallocate 0
mark step 1
allocate 2 28672
deallocate 2
mark step 2
mark a word about step 2
mark step 3
mark step 4
allocate 3 12288
allocate 4 8192
deallocate 4
deallocate 3
"""


@pytest.fixture
def tiny() -> list[Operation]:
    return list(read_trace(io.StringIO(TINY)))


def test_exact_sizes(tiny: list[Operation]) -> None:
    figures = count(tiny, lambda source: CachingPool(source, round_up))
    # 8192, 4096, 28672 and 12288 are taken once each; the second 8192 is the first one.
    reserved = 8192 + 4096 + 28672 + 12288
    assert figures == Figures(10, 28672, reserved / 28672, reserved / 20480, source_calls=4, steady_source_calls=1)


def test_powers_of_two(tiny: list[Operation]) -> None:
    figures = count(tiny, lambda source: CachingPool(source, power_of_two))
    # 28672 takes 32768, and 12288 takes 16384.
    reserved = 8192 + 4096 + 32768 + 16384
    assert figures == Figures(10, 28672, reserved / 28672, reserved / 20480, source_calls=4, steady_source_calls=1)


def test_slabs(tiny: list[Operation]) -> None:
    figures = count(tiny, slab_pool(32768))
    assert figures == Figures(10, 28672, 32768 / 28672, 32768 / 20480, source_calls=1, steady_source_calls=0)


def test_a_slab_that_is_taken_in_advance_is_the_smallest_that_serves(tiny: list[Operation]) -> None:
    figures = count(tiny, in_advance(tiny))
    assert figures.peak_live == 28672
    assert (figures.reserved_per_live, figures.source_calls, figures.steady_source_calls) == (1, 1, 0)
    apart = [Allocated(n, 4096) for n in range(4)] + [Deallocated(0), Deallocated(2), Allocated(4, 8192)]
    steps = [Marked(f"step {n}") for n in range(4)]
    figures = count([*steps, *apart], in_advance([*steps, *apart]))
    assert figures.reserved_per_live == 1.5, "the two that were freed do not lie together"


def test_live_bytes_are_those_that_were_asked_for() -> None:
    steps: list[Operation] = [Marked(f"step {step}") for step in range(4)]
    figures = count([*steps, Allocated(0, 1000)], lambda source: CachingPool(source, round_up))
    assert (figures.peak_live, figures.reserved_per_live) == (1000, 4.096)


def test_what_is_live_since_before_the_fourth_step_is_live_in_it() -> None:
    steps: list[Operation] = [Marked(f"step {step}") for step in range(4)]
    trace = [Allocated(0, 8192), *steps, Allocated(1, 4096), Deallocated(1)]
    figures = count(trace, lambda source: CachingPool(source, round_up))
    assert figures == Figures(3, 12288, 1.0, 1.0, source_calls=2, steady_source_calls=1)


def test_what_a_pool_gives_back_counts_as_a_call_and_is_not_held_in_the_end() -> None:
    class Giving(SlabPool):
        def deallocate(self, region: object) -> None:
            super().deallocate(region)  # type: ignore[arg-type]
            self.trim()

    steps: list[Operation] = [Marked(f"step {step}") for step in range(4)]
    trace = [*steps, Allocated(0, 16384), Deallocated(0), Allocated(1, 4096)]
    figures = count(trace, lambda source: Giving(source, 8192))
    assert figures == Figures(3, 16384, 1.0, 8192 / 16384, source_calls=3, steady_source_calls=3)


@pytest.mark.parametrize("lines", ["", "mark step 0\n" * 3, "mark step 0\n" * 4])
def test_a_trace_without_anything_after_its_first_steps_is_refused(lines: str) -> None:
    trace = list(read_trace(io.StringIO("allocation-trace 1\n" + lines)))
    with pytest.raises(ValueError, match=r"(follows|after) the first 3"):
        count(trace, SlabPool)


def test_the_source_never_gives_one_address_twice() -> None:
    source = CountingSource()
    first, second = source.allocate(1), source.allocate(4097)
    source.deallocate(first)
    third = source.allocate(1)
    assert first.ptr < second.ptr < third.ptr
    assert second.ptr + 4097 <= third.ptr
    assert (source.calls, source.reserved, source.peak) == (4, 4098, 4098)


@pytest.mark.parametrize(("nbytes", "expected"), [(1, 1), (4096, 4096), (4097, 8192), (3 << 30, 4 << 30)])
def test_power_of_two(nbytes: int, expected: int) -> None:
    assert power_of_two(nbytes) == expected


SHAPE = Shape(layers=2, hidden=1024, ffn=3072, heads=8, kv_heads=2, vocab=5000)


def test_what_a_layer_saves() -> None:
    # For 1024 tokens: 2 MiB where it is as wide as the model, 0.5 MiB for k and v, 6 MiB in the feed-forward part.
    wide, kv, ffn = 2 * MIB, MIB // 2, 6 * MIB
    attention = [wide, 4096, wide, wide, kv, kv, wide, 32768]
    assert SHAPE.saved_by_a_layer(1024) == [*attention, wide, 4096, wide, ffn, ffn, ffn, ffn]


def test_the_weights_of_a_model_are_as_many_as_it_says() -> None:
    assert len(SHAPE.weights()) == 2 * 9 + 3
    layer = 1024 * (1024 + 256 + 256 + 1024 + 3 * 3072) + 2 * 1024
    assert sum(SHAPE.weights()) == 2 * layer + 1024 + 2 * 5000 * 1024
    assert round(sum(QWEN_7B.weights()) / 1e9, 1) == 7.6


def test_what_leaves_together_shares_leases() -> None:
    assert leases_for([]) == []
    assert leases_for([10]) == [4096]
    assert leases_for([4 * MIB, 4 * MIB, 1]) == [8 * MIB, 4096]
    assert leases_for([MIB, 10 * MIB, MIB, MIB + 1]) == [MIB, 10 * MIB, 2 * MIB + 4096]


def test_steps_of_training() -> None:
    # Of 2 MiB are 6 and of 6 MiB 4, up to 8 MiB in a lease; k and v, of half a MiB, and what is smaller stay.
    trace = list(training(SHAPE, [1024, 4096]))
    steps = [operation.name for operation in trace if isinstance(operation, Marked)]
    assert steps == ["step 0", "step 1"]
    sizes = [operation.nbytes // MIB for operation in trace if isinstance(operation, Allocated)]
    short, long = [8, 4, 6, 6, 6, 6], [8, 8, 8, 4, 8, 8, 8, 24, 24, 24, 24]  # k and v, of 2 MiB now, share one
    assert sizes == 2 * short + 2 * long
    returned = [operation.number for operation in trace if isinstance(operation, Deallocated)]
    layers = [range(6), range(6, 12), range(12, 23), range(23, 34)]
    assert returned == [n for layer in (1, 0, 3, 2) for n in layers[layer]], "the last layer first"


def test_the_states_of_adam_come_first_and_stay() -> None:
    trace = list(training(SHAPE, [1024], adam=True))
    states = trace[: trace.index(Marked("step 0"))]
    sizes = [state.nbytes for state in states if isinstance(state, Allocated)]
    assert len(sizes) == len(states) == 21
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[:3] == 2 * [8 * 5000 * 1024] + [8 * 1024 * 3072]
    assert sum(sizes) == 8 * sum(SHAPE.weights())
    gone = {operation.number for operation in trace if isinstance(operation, Deallocated)}
    assert gone == set(range(len(states), len(states) + 2 * 6)), "all of two layers, and nothing else"


def test_lengths_are_within_their_range_and_the_same_each_time() -> None:
    lengths = free_lengths(0)
    assert len(lengths) == STEPS
    assert 512 <= min(lengths) < 1500
    assert 7000 < max(lengths) <= 8192
    assert lengths == free_lengths(0) != free_lengths(1)


@pytest.mark.parametrize("name", generated_traces())
def test_a_generated_trace_is_one(name: str) -> None:
    live: set[int] = set()
    states: set[int] = set()
    steps = 0
    for operation in generated_traces()[name]():
        match operation:
            case Allocated(number, nbytes):
                assert number not in live
                assert nbytes > 0
                live.add(number)
            case Deallocated(number):
                live.remove(number)
            case Marked(mark):
                assert mark == f"step {steps}"
                states = states if steps else set(live)
                assert live == states, "the optimizer's states stay, and nothing else"
                steps += 1
    assert steps == STEPS
    assert live == states


def test_the_recorded_traces_can_be_replayed() -> None:
    paths = sorted(RECORDED.glob("*.trace.gz"))
    assert [path.name for path in paths] == [
        f"{name}.trace.gz" for name in ("gpt-changing-large", "gpt-changing", "gpt-fixed")
    ]
    assert sum(path.stat().st_size for path in paths) < 100_000
    for path in paths:
        trace = load(path)
        assert sum(isinstance(operation, Marked) for operation in trace) == STEPS
        figures = count(trace, lambda source: SlabPool(source, MIB))
        assert figures.peak_live > 100 * MIB
    fixed = load(RECORDED / "gpt-fixed.trace.gz")
    sizes = [operation.nbytes for operation in fixed if isinstance(operation, Allocated)]
    assert len(sizes) % STEPS == 0
    assert sizes == STEPS * sizes[: len(sizes) // STEPS], "each step asks for the same"


def test_all_traces_have_a_name() -> None:
    names = list(traces())
    assert names[: len(generated_traces())] == list(generated_traces())
    assert names[-1] == "recorded gpt-fixed"
