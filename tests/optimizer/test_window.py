"""The device memory that states pass through is bounded, and handed round without a copy overtaking another."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.optimizer.conftest import MakeTiered
from tests.optimizer.training import differences, give_gradients, make_params, outcome
from tiered_mem import TieringManager
from tiered_mem.optimizer.window import Range, Ring
from tiered_mem.sizes import parse_bytes

KIB = 1024


@pytest.mark.parametrize(
    "shapes",
    [[(64, 64)] * 12, [(64, 64)] * 3 + [(256, 256)] + [(64, 64)] * 3, [(300, 100), (10, 10), (300, 100), (7,)]],
    ids=["even", "one large", "few large"],
)
@pytest.mark.parametrize("bucket_bytes", [64 * KIB, 256 * KIB])
def test_a_step_takes_two_buckets_and_the_largest_state(
    shapes: list[tuple[int, ...]], bucket_bytes: int, device: str, make_tiered: MakeTiered
) -> None:
    """On top of parameters and gradients, in the first step, which makes the states, as in any other."""
    module = torch.get_device_module(device)
    params = make_params(device, shapes=shapes)
    states = [2 * param.nbytes + 512 for param in params]  # with the fused optimizer's step counter
    tiered = make_tiered(torch.optim.AdamW(params, fused=True), bucket_bytes=bucket_bytes)
    bound = 2 * bucket_bytes + max(states) + 512 * len(params)
    gc.collect()  # what others have left in a circle would be counted when it goes
    for step in range(4):
        give_gradients(params, step, missing=False)
        module.synchronize()
        before = module.memory_allocated()
        module.reset_peak_memory_stats()
        tiered.step()
        peak = module.max_memory_allocated() - before
        assert peak <= bound
        assert module.memory_allocated() == before
        if sum(states) > 2 * bound and step:
            assert peak < sum(states)


def test_where_there_is_no_piece_for_the_window_the_largest_bucket_has_room(
    device: str, make_tiered: MakeTiered, caplog: pytest.LogCaptureFixture
) -> None:
    """Buckets pass one after another, with the same numbers, as long as the device has no more."""
    module = torch.get_device_module(device)
    expected, params = (make_params(device, shapes=[(1024, 1024)] * 12) for _ in range(2))
    plain = torch.optim.SGD(expected, momentum=0.9, foreach=False)
    optimizer = torch.optim.SGD(params, momentum=0.9, foreach=False)
    tiered = make_tiered(optimizer, bucket_bytes="16MiB", host_bytes="64MiB")
    for step in range(4):
        give_gradients(expected, step)
        plain.step()
        give_gradients(params, step)
        module.empty_cache()
        room = "20MiB" if step in (1, 2) else "1GiB"
        most = module.memory_reserved() + parse_bytes(room)
        module.set_per_process_memory_fraction(most / module.mem_get_info()[1])
        try:
            tiered.step()
        finally:
            module.set_per_process_memory_fraction(1.0)
    assert not differences(outcome(plain, expected), outcome(tiered, params))
    (told,) = [
        record.getMessage() for record in caplog.records if "torch's pool has no piece" in record.getMessage()
    ]
    assert "through 8.0 MiB of device memory in place of 32.0 MiB" in told


def test_what_came_early_and_has_no_gradient_makes_room(device: str, make_tiered: MakeTiered) -> None:
    """It would be in the way of the buckets that are stepped, which need the whole window."""
    results = []
    for tier in (False, True):
        params = make_params(device, shapes=[(64, 64)] * 12)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(params)
        if tier:
            optimizer = make_tiered(optimizer, bucket_bytes=64 * KIB)
        for step in range(3):
            give_gradients(params, step, missing=False)
            if step:
                params[0].grad = None
            if tier and step:
                states = optimizer.states  # type: ignore[attr-defined]
                first = states.pipeline.buckets[0]
                states.pipeline.bring([(first, set(first.params))])
            optimizer.step()
        results.append(outcome(optimizer, params))
    assert not differences(*results)


def test_the_first_bucket_comes_while_backward_ends(device: str, make_tiered: MakeTiered) -> None:
    """And does not add to the peak."""
    module = torch.get_device_module(device)
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, device=device) for _ in range(10)))
    tiered = make_tiered(torch.optim.AdamW(layers.parameters()), bucket_bytes=32 * KIB)
    held = []
    for step in range(4):
        for _ in range(2):
            module.reset_peak_memory_stats()
            layers(torch.ones(4096, 64, device=device)).sum().backward()
            peak = module.max_memory_allocated()
            held.append(module.memory_allocated())
        assert module.max_memory_allocated() == peak
        tiered.step()
        tiered.zero_grad()
        if step == 0:
            held.clear()
    without, with_window = held[::2], held[1::2]
    assert all(more >= less + 16 * KIB for less, more in zip(without, with_window, strict=True))


def test_nothing_comes_early_where_all_memory_is_planned(device: str) -> None:
    """No plan would have it, nor keep the budget with it."""
    module = torch.get_device_module(device)
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, device=device) for _ in range(10)))
    with TieringManager(policy="auto", device=device, device_budget="64MiB", host_bytes="64MiB") as manager:
        tiered = manager.register_optimizer(torch.optim.AdamW(layers.parameters()), bucket_bytes=32 * KIB)
        held = []
        for _ in range(4):
            loss = layers(torch.ones(4096, 64, device=device)).sum()
            loss.backward()
            del loss
            held.append(module.memory_allocated())
            tiered.step()
            tiered.zero_grad()
    assert len(set(held)) == 1


def test_without_room_nothing_comes_early(device: str, make_tiered: MakeTiered) -> None:
    module = torch.get_device_module(device)
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, device=device) for _ in range(10)))
    tiered = make_tiered(torch.optim.AdamW(layers.parameters()), bucket_bytes=32 * KIB)
    held = []
    for _ in range(3):
        layers(torch.ones(1, 64, device=device)).sum().backward()
        module.reset_peak_memory_stats()  # what is allocated now is the peak
        held.append(module.memory_allocated())
        tiered.step()
        tiered.zero_grad()
        module.reset_peak_memory_stats()
        blocker = torch.empty(64 << 20, dtype=torch.uint8, device=device)
        del blocker
        module.reset_peak_memory_stats()
    assert held[1] == held[2]


def test_a_step_that_is_left_out_gives_the_memory_back(device: str, make_tiered: MakeTiered) -> None:
    module = torch.get_device_module(device)
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, device=device) for _ in range(10)))
    tiered = make_tiered(torch.optim.AdamW(layers.parameters()), bucket_bytes=32 * KIB)
    for _ in range(2):
        layers(torch.ones(4096, 64, device=device)).sum().backward()
        tiered.step()
        tiered.zero_grad()
    before = module.memory_allocated()
    layers(torch.ones(4096, 64, device=device)).sum().backward()
    tiered.zero_grad()
    assert module.memory_allocated() == before


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=60))
def test_a_range_is_handed_out_again_to_one_who_waits(requests: list[tuple[int, bool]]) -> None:
    ring: Ring[int] = Ring(100)
    live: list[tuple[int, Range[int]]] = []
    waited: set[int] = set()
    last_user = [-1] * 100
    for number, (nbytes, early) in enumerate(requests):
        taken = ring.take(nbytes)
        if taken is None:
            assert live, "there is nobody in the way"
            for name, other in live:
                other.leave([name])
            live.clear()
            taken = ring.take(nbytes)
            assert taken is not None
        assert taken.end - taken.start == nbytes
        assert 0 <= taken.start < taken.end <= 100
        assert all(other.end <= taken.start or taken.end <= other.start for _, other in live)
        waited |= set(taken.after)
        assert set(last_user[taken.start : taken.end]) - {-1} <= waited
        last_user[taken.start : taken.end] = [number] * nbytes
        live.append((number, taken))
        if early:
            for name, other in live:
                other.leave([name])
            live.clear()
    for name, other in live:
        other.leave([name])
    assert set(last_user) - {-1} <= waited | set(ring.waits())


def test_a_ring_has_no_more_than_it_has() -> None:
    with pytest.raises(ValueError, match="101 bytes of a ring of 100"):
        Ring[int](100).take(101)
