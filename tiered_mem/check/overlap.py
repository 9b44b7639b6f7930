"""Copies beside other work: that nobody waits for them, and their rates."""

from __future__ import annotations

import time
from functools import partial

import torch

from ..device.device import Event
from ..device.transfer import Direction, TransferEngine
from ..tiers.measure import measured_link
from ..tiers.pinning import pinned_slab
from .bench import Bench
from .copies import both_sides
from .order import ARRIVED, RELEASED
from .outcome import Check, Outcome, failed, passed

_BYTES, _SMALL = 16 << 20, 1 << 20
_FIRST_S, _ATTEMPTS = 0.02, 7
_TIMED = 5
_LINK_BYTES, _QUICK_LINK_BYTES = 128 << 20, 32 << 20
_WORDS: dict[Direction, str] = {"offload": "to the host", "reload": "to the device"}


def overlap() -> list[Check]:
    nothing = "memory of the cpu is not copied to a device"
    asynchronous = [
        Check("asynchronous to the host", partial(_asynchronous, way="offload"), (RELEASED,), nothing),
        Check("asynchronous to the device", partial(_asynchronous, way="reload"), (ARRIVED,), nothing),
    ]
    needs = (RELEASED, ARRIVED, *(check.name for check in asynchronous))
    return [
        *asynchronous,
        Check("both directions at once", _both_at_once, needs, nothing),
        Check("beside compute", _beside_compute, needs, nothing),
        Check("link rates", _rates, needs, nothing),
    ]


def _asynchronous(bench: Bench, way: Direction) -> Outcome:
    """The copy stands behind work of another stream, and the caller is back while that has not ended.

    So it needs no clock. A host that was held up by other processes tries again with more work. torch_npu calls the
    runtime on a thread of its own, so its calls return at once whatever the copy does: there it is what is issued
    next, an event of an idle stream, that has to pass while the copy cannot have begun.
    """
    device, idle = bench.device, bench.device.new_stream()
    current = device.current_stream()
    waited, held_up = 0, 0
    with both_sides(bench, _BYTES) as (on_device, on_host):
        for attempt in range(_ATTEMPTS):
            work = bench.load.begin(current, _FIRST_S * 2**attempt)
            began = time.perf_counter()
            if way == "offload":
                bench.engine.offload([on_device], [on_host], [current])
            else:
                bench.engine.reload([on_host], [on_device], current, [None])
            seconds = time.perf_counter() - began
            ahead = not work.query()
            beside = ahead and _first_of(idle.record_event(), work)
            device.synchronize()
            if ahead and beside:
                return passed(
                    "the caller went on, and other streams too, before the copy had begun",
                    call=(1e6 * seconds, "us"),
                )
            waited, held_up = waited + (not ahead), held_up + (ahead and not beside)
    if waited > held_up:
        return failed(f"the call returned only when the copy could have ended, {waited} times of {_ATTEMPTS}")
    return failed(
        f"what was issued after the copy, on an idle stream, came only when the copy had begun, {held_up} times of "
        f"{_ATTEMPTS}: the copy blocks the queue of work"
    )


def _both_at_once(bench: Bench) -> Outcome:
    """A small copy of one direction ends while a large one of the other, which was issued before it, has not."""
    device = bench.device
    with both_sides(bench, _BYTES) as (large_there, large_here), both_sides(bench, _SMALL) as (there, here):
        for way in ("offload", "reload"):
            for attempt in range(_ATTEMPTS):
                many = 2 ** (attempt + 1)
                if way == "offload":
                    large = bench.engine.offload([large_there] * many, [large_here] * many, []).event
                    small = bench.engine.reload_into([here], [there], []).event
                else:
                    large = bench.engine.reload_into([large_here] * many, [large_there] * many, []).event
                    small = bench.engine.offload([there], [here], []).event
                beside = _first_of(small, large)
                device.synchronize()
                if beside:
                    break
            else:
                return failed(f"no copy went the other way while copies {_WORDS[way]} were under way")
    return passed("a small copy overtook large ones of the other direction, each way")


def _beside_compute(bench: Bench) -> Outcome:
    """A copy is done while the work that was issued before it is not."""
    device = bench.device
    current = device.current_stream()
    with both_sides(bench, _BYTES) as (on_device, on_host):
        for way in _WORDS:
            for attempt in range(_ATTEMPTS):
                work = bench.load.begin(current, _FIRST_S * 2**attempt)
                if way == "offload":
                    copied = bench.engine.offload([on_device], [on_host], []).event
                else:
                    copied = bench.engine.reload_into([on_host], [on_device], []).event
                beside = _first_of(copied, work)
                device.synchronize()
                if beside:
                    break
            else:
                return failed(f"each copy {_WORDS[way]} ended only after the work that was computed beside it")
    return passed("copies ended, each way, while work from before them was still computed")


def _rates(bench: Bench) -> Outcome:
    nbytes = _QUICK_LINK_BYTES if bench.quick else _LINK_BYTES
    with pinned_slab(bench.device, nbytes) as (pin, on_host):
        link = measured_link(bench.device, on_host, rounds=3 if bench.quick else 7)
        out = _share_under_compute(bench, "offload", on_host)
        back = _share_under_compute(bench, "reload", on_host)
    together = link.both * (link.out + link.back)
    return passed(
        f"{_speed(link.out)} to the host, {_speed(link.back)} to the device, {_speed(together)} both at once "
        f"({link.both:.0%} of the sum); under compute {out:.0%} and {back:.0%} of alone; pin={pin!r}",
        to_host=(link.out / 1e9, "GB/s"),
        to_device=(link.back / 1e9, "GB/s"),
        both=(together / 1e9, "GB/s"),
        to_host_under_compute=(100 * out, "%"),
        to_device_under_compute=(100 * back, "%"),
    )


def _share_under_compute(bench: Bench, way: Direction, on_host: torch.Tensor) -> float:
    """The rate of a copy beside work that is long enough, as a share of that alone."""
    device, stream = bench.device, bench.device.new_stream()
    engine = TransferEngine(device, stream)
    on_device = on_host.new_zeros(len(on_host), device=device.torch_device)

    def seconds(work: float) -> float:
        device.synchronize()
        if work:
            bench.load.begin(device.current_stream(), work)
        began = device.timed_event(stream)
        if way == "offload":
            engine.offload([on_device], [on_host], [])
        else:
            engine.reload_into([on_host], [on_device], [])
        ended = device.timed_event(stream)
        device.synchronize()
        return max(device.elapsed(began, ended), 1e-9)

    # The best of some: other processes of the machine make a copy slower, and never faster.
    alone = min(seconds(0) for _ in range(_TIMED))
    return alone / min(seconds(4 * alone) for _ in range(_TIMED))


def _first_of(first: Event, other: Event) -> bool:
    """Whether `first` passes while `other` has not."""
    while not first.query():
        if other.query():
            return False
    return not other.query()


def _speed(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"
