"""Events, by which streams wait for each other."""

from __future__ import annotations

import torch

from .bench import Bench
from .outcome import Check, Outcome, failed, passed

EVENTS = "events order streams"
_LOAD_S = 1e-3


def events() -> list[Check]:
    return [Check(EVENTS, _events, (), "a cpu does its work in one order")]


def _events(bench: Bench) -> Outcome:
    """A stream that waits for an event finds what was written before it, by a kernel that comes late."""
    device, side = bench.device, bench.device.new_stream()
    current, rounds = device.current_stream(), bench.rounds(200)
    for writer, reader, words in ((current, side, "a side stream"), (side, current, "the main stream")):
        cells = torch.full((rounds,), -1, dtype=torch.int32, device=device.torch_device)
        seen = torch.full_like(cells, -2)
        device.synchronize()
        for number in range(rounds):
            bench.load.begin(writer, _LOAD_S)
            with device.on(writer):
                cells[number].fill_(number)
            reader.wait_event(writer.record_event())
            with device.on(reader):
                seen[number].copy_(cells[number])
        device.synchronize()
        wrong = int((seen.cpu() != torch.arange(rounds, dtype=torch.int32)).sum())
        if wrong:
            return failed(f"{words} that waited for an event read before it, {wrong} times of {rounds}")
    return passed(f"{2 * rounds} waits kept the order", rounds=(2 * rounds, ""))
