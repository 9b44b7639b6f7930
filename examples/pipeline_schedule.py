"""Eight microbatches through one stage of a pipeline; their activations leave and come back as a dictionary says.

Forwards and backwards interleave: F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7. Microbatches 1 to 6
wait long for their backward, and are offloaded meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import screen  # says what is missing, before torch does
import torch
from gpt import Layer
from rich.table import Table

from tiered_mem import TieringManager
from tiered_mem.policies import SynchronizationDictPolicy

ORDER = ["F0", "F1", "F2", "F3", "B0", "F4", "B1", "F5", "B2", "F6", "B3", "F7", "B4", "B5", "B6", "B7"]

# Microbatch: (released at a forward?, of which, reloaded at a forward?, of which).
SCHEDULE = {
    1: (False, 0, True, 4),
    2: (False, 0, True, 5),
    3: (True, 4, True, 6),
    4: (True, 5, True, 7),
    5: (True, 6, False, 4),
    6: (True, 7, False, 5),
}
MIB = 1 << 20


def main() -> int:
    options = parse()
    shown = screen.Screen("examples/pipeline_schedule.py")
    console, kind = shown.console, shown.kind
    stage = Stage(kind, options)
    console.print(drawn_schedule(), highlight=False)

    plain, expected = stage.step(contextlib.nullcontext(), lambda output: output)
    policy = SynchronizationDictPolicy(SCHEDULE, order=ORDER)
    with TieringManager(policy=policy, device=kind, host_bytes=options.host_bytes, trace=True) as manager:
        offload = manager.layer_context(stage.microbatches, variable_depth=False)
        stage.step(offload, offload.sync)  # takes the host memory, which the next step finds ready
        offloaded, gradients = stage.step(offload, offload.sync)
        console.print(table(plain, offloaded))
        console.print(manager.memory_summary(), highlight=False)
        manager.export_trace(options.trace)
    console.print(drawn_trace(json.loads(options.trace.read_text()), console.width), highlight=False)

    equal = all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
    console.print(f"trace: {options.trace}")
    shown.overhead("what compute waited for copies, as the table says")
    shown.verdict("gradients of both runs are bit-equal", right=equal)
    return 0 if equal and sum(offloaded) < sum(plain) else 1


class Stage:
    """Some layers, and a microbatch for each forward."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.microbatches = 1 + max(int(moment[1:]) for moment in ORDER)
        self._device = getattr(torch, kind)
        layers = (Layer(options.width, 4, options.context) for _ in range(options.layers))
        self._model = torch.nn.Sequential(*layers).to(kind)
        shape = (options.batch, options.context, options.width)
        self._inputs = [torch.randn(shape).to(kind) for _ in range(self.microbatches)]

    def step(self, context: Any, sync: Any) -> tuple[list[int], list[torch.Tensor]]:
        """All forwards and backwards once. Returns the bytes on the device after each, and the gradients."""
        for weight in self._model.parameters():
            weight.grad = torch.zeros_like(weight)
        before = self._device.memory_allocated()
        held: list[int] = []
        outputs: dict[int, torch.Tensor] = {}
        for moment in ORDER:
            number = int(moment[1:])
            if moment[0] == "F":
                with context:
                    output = self._model(self._inputs[number])
                outputs[number] = sync(output)
                del output
            else:
                outputs.pop(number).pow(2).mean().backward()
            held.append(self._device.memory_allocated() - before)
        self._device.synchronize()
        return held, [weight.grad.cpu() for weight in self._model.parameters()]


def table(plain: list[int], offloaded: list[int]) -> Table:
    """Bytes of activations after each moment, in MiB."""
    result = Table("MiB on the device after", *ORDER, padding=(0, 1, 0, 0), box=None)
    for name, held in (("plain", plain), ("offloaded", offloaded)):
        result.add_row(name, *(f"{nbytes / MIB:.0f}" for nbytes in held))
    return result


def drawn_schedule() -> str:
    """Where each microbatch's activations are at each moment."""
    rows = ["microbatches: # on the device, > leaving, . on the host, < coming back", "   " + " ".join(ORDER)]
    for number in range(1 + max(SCHEDULE)):
        rows.append(f"{number:>2} " + "  ".join(_place(number, step) for step in range(len(ORDER))).rstrip())
    return "\n".join(rows)


def _place(number: int, step: int) -> str:
    def at(forward: bool, layer: int) -> int:
        return ORDER.index(f"{'F' if forward else 'B'}{layer}")

    begin, end = at(True, number), at(False, number)
    if not begin <= step <= end:
        return " "
    if number not in SCHEDULE or step in (begin, end):
        return "#"
    offload_forward, offload, reload_forward, reload = SCHEDULE[number]
    if step < at(offload_forward, offload):
        return ">"
    return "." if step < at(reload_forward, reload) else "<"


def drawn_trace(trace: dict[str, Any], width: int) -> str:
    """The last step's tracks as text. Capitals are forwards, the other letters backwards: A is microbatch 0."""
    events = trace["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    start = max(span["ts"] for span in spans if span["name"] == "forward 0")
    spans = [span for span in spans if span["ts"] >= start]
    end = max(span["ts"] + span["dur"] for span in spans)
    label = max(len(name) for name in tracks.values())
    columns = max(20, width - label - 2)
    lines = {tid: [" "] * columns for tid in tracks}
    for span in sorted(spans, key=lambda span: span["ts"]):
        first = int((span["ts"] - start) / (end - start) * columns)
        last = int((span["ts"] + span["dur"] - start) / (end - start) * columns)
        for column in range(first, min(max(last, first + 1), columns)):
            lines[span["tid"]][column] = _letter(span["name"])
    drawn = [f"{tracks[tid]:<{label}}  {''.join(line)}".rstrip() for tid, line in lines.items()]
    return "\n".join([f"{(end - start) / 1e3:.0f} ms of device time", *drawn])


def _letter(name: str) -> str:
    word, _, number = name.partition(" ")
    if word in ("forward", "backward"):
        letter = chr(ord("A") + int(number))
        return letter if word == "forward" else letter.lower()
    return "="


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--host-bytes", default="1GiB", help="host memory for activations")
    default = Path(tempfile.gettempdir()) / "pipeline_trace.json"
    parser.add_argument("--trace", type=Path, default=default, help="where the trace is written")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
