"""torch's pool of device memory."""

from __future__ import annotations

import torch

from ..device.device import DevicePeak
from .bench import Bench
from .outcome import Check, Outcome, failed, passed

_BYTES = 32 << 20


def memory() -> list[Check]:
    none = "torch counts no memory of the cpu"
    return [Check("memory is free at once", _free, (), none), Check("torch's peak", _peak, (), none)]


def _free(bench: Bench) -> Outcome:
    """A tensor that is dropped counts no more, while the device has not begun with the work on it."""
    device, load = bench.device, bench.load
    device.synchronize()
    before = device.memory()[0]
    work = load.begin(device.current_stream(), 0.05)
    held = device.empty(_BYTES, torch.uint8).fill_(1)
    address, during = held.data_ptr(), device.memory()[0]
    del held
    after = device.memory()[0]
    again = device.empty(_BYTES, torch.uint8)
    same = again.data_ptr() == address
    del again
    ahead = not work.query()
    device.synchronize()
    if during < before + _BYTES:
        return failed(f"{_BYTES} bytes were allocated, and torch counts {during - before} more")
    if after != before:
        return failed(f"after a tensor of {_BYTES} bytes was dropped torch counts {after - before} bytes more")
    if not same:
        return failed("memory that was dropped was not handed out again for the same stream")
    asked = "before the device was through with it" if ahead else "when it was dropped"
    return passed(f"it was handed out again {asked}")


def _peak(bench: Bench) -> Outcome:
    """It begins anew, and DevicePeak gives it back the height that it had."""
    device, peak = bench.device, DevicePeak(bench.device)
    device.reset_peak()
    held = device.empty(_BYTES, torch.uint8)
    del held
    now, high, _ = device.memory()
    if high < now + _BYTES:
        return failed(f"{_BYTES} bytes came and went, and the peak is {high - now} bytes above what is allocated")
    peak.begin_anew()
    low = device.memory()[1]
    peak.restore()
    restored = device.memory()[1]
    if low != now:
        return failed(f"the peak began anew, and is {low - now} bytes above what is allocated")
    if not high - (1 << 20) <= restored <= high:
        return failed(f"the peak was {high} bytes, and {restored} when it was given back")
    return passed("it begins anew, and is given back", total=(device.usable_and_total()[1] / 1e9, "GB"))
