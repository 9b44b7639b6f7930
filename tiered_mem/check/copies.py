"""Copies between pinned host memory and the device: that they bring what they should."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..tiers.pinning import pinned_slab
from .bench import Bench
from .events import EVENTS
from .outcome import Check, Outcome, failed, passed
from .pinned import PINNED

TO_HOST, TO_DEVICE = "bytes to the host", "bytes to the device"
_BYTES = 16 << 20


def copies() -> list[Check]:
    nothing = "memory of the cpu is not copied to a device"
    needs = (PINNED, EVENTS)
    return [Check(TO_HOST, _bytes_to_host, needs, nothing), Check(TO_DEVICE, _bytes_to_device, needs, nothing)]


@contextlib.contextmanager
def both_sides(bench: Bench, nbytes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """So many bytes on the device, and pinned ones on the host. Nothing uses them when it begins, or afterwards."""
    with pinned_slab(bench.device, nbytes) as (_, on_host):
        on_device = on_host.new_zeros(nbytes, device=bench.device.torch_device)
        bench.device.synchronize()
        try:
            yield on_device, on_host[:nbytes]
        finally:
            bench.device.synchronize()


def _bytes_to_host(bench: Bench) -> Outcome:
    rounds = bench.rounds(16)
    with both_sides(bench, _BYTES) as (on_device, on_host):
        numbers = torch.arange(on_device.nbytes // 4, dtype=torch.int32)
        on_host, on_device = on_host.view(torch.int32), on_device.view(torch.int32)
        for number in range(rounds):
            torch.arange(len(numbers), dtype=torch.int32, device=bench.device.torch_device, out=on_device)
            on_device.add_(number)
            bench.engine.offload([on_device], [on_host], [bench.device.current_stream()]).wait()
            if wrong := _wrong(on_host, numbers + number):
                return failed(f"after copy {number + 1} to the host {wrong}")
    return passed(f"{rounds} copies of {_BYTES >> 20} MiB brought what they should")


def _bytes_to_device(bench: Bench) -> Outcome:
    rounds = bench.rounds(16)
    with both_sides(bench, _BYTES) as (on_device, on_host):
        on_host, on_device = on_host.view(torch.int32), on_device.view(torch.int32)
        expected = torch.arange(len(on_device), dtype=torch.int32, device=bench.device.torch_device)
        for number in range(rounds):
            torch.arange(number, len(on_host) + number, dtype=torch.int32, out=on_host)
            bench.engine.reload_into([on_host], [on_device], []).wait()
            # Counted on the device: what it has counts, and not what comes back.
            different = on_device != expected + number
            if count := int(different.sum().item()):
                first = int(different.int().argmax().item())
                return failed(
                    f"after copy {number + 1} to the device {count} of {len(expected)} numbers there are wrong, "
                    f"the first at {first}"
                )
    return passed(f"{rounds} copies of {_BYTES >> 20} MiB brought what they should")


def _wrong(found: torch.Tensor, expected: torch.Tensor) -> str:
    different = found != expected
    count = int(different.sum())
    first = int(different.int().argmax())
    return f"{count} of {len(found)} numbers are wrong, the first at {first}" if count else ""
