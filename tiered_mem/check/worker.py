"""The process in which checks run. It is asked for one after the other, and may be killed at any time."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from ..device.device import Device
from ..errors import DeviceUnavailable
from ..spill.filesystem import Files
from .bench import Bench
from .catalogue import catalogue
from .outcome import Check, Outcome, not_applicable

_LIBRARIES = ("libascendcl.so", "libcuda.so")
_LETTERS = 500
_LOOKS_EACH_S = 0.5


def serve(arguments: Mapping[str, Any], requests: IO[str], answers: IO[str], files: Files | None = None) -> None:
    """Says what there is to check, and checks what it is asked for, a name a line, until there are no more.

    arguments: device, a kind or None for the accelerator that is there; folder; and quick.
    files: for tests.
    """

    def answer(**what: object) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        device = Device(arguments["device"])
    except (DeviceUnavailable, ValueError) as error:
        answer(refused=str(error))
        return
    _be_repeatable()
    torch.set_num_threads(1)  # several would spin, for seconds where other processes run, for work that is small
    subjects = catalogue()
    answer(
        device=_about(device),
        checks=[
            {"name": check.name, "subject": subject, "needs": check.needs}
            for subject, checks in subjects.items()
            for check in checks
        ],
    )
    checks = {check.name: check for each in subjects.values() for check in each}
    bench = Bench(device, Path(arguments["folder"]), quick=arguments["quick"], files=files)
    for line in requests:
        began = time.monotonic()
        found = outcome_of(checks[line.strip()], bench)
        answer(
            verdict=found.verdict,
            reason=found.reason,
            figures={name: {"value": value, "unit": unit} for name, (value, unit) in found.figures.items()},
            seconds=round(time.monotonic() - began, 3),
        )


def outcome_of(check: Check, bench: Bench) -> Outcome:
    """What a check finds, whatever it raises."""
    if bench.device.kind == "cpu" and check.on_cpu:
        return not_applicable(check.on_cpu)
    try:
        return check.run(bench)
    except Exception as error:  # whatever the machine comes up with is what was to be found out
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Outcome("fail", f"{type(error).__name__}: {' '.join(lines)[:_LETTERS]}")


def _be_repeatable() -> None:
    """Kernels that add in any order come to other bits each time, with the library and without."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010


def _about(device: Device) -> dict[str, object]:
    module = None if device.kind == "cpu" else torch.get_device_module(device.kind)
    return {
        "kind": device.kind,
        "name": _cpu() if module is None else str(module.get_device_name(device.torch_device)),
        "memory_bytes": device.usable_and_total()[1] or None,
        "runtime": _runtime(),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "cpu"


def _runtime() -> str | None:
    """The library of the device's runtime that this process has loaded. The end of its path says whose that is."""
    with open("/proc/self/maps") as maps:
        paths = {Path(line.split(maxsplit=5)[5].strip()) for line in maps if len(line.split(maxsplit=5)) == 6}
    found = sorted(path for path in paths if path.name.startswith(_LIBRARIES))
    return "/".join(found[0].parts[-4:]) if found else None


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone, which may have been killed while a check hung."""
    while os.getppid() == parent:
        time.sleep(_LOOKS_EACH_S)
    os._exit(1)


def main(arguments: list[str]) -> int:
    """arguments: as JSON, and the file descriptor for answers."""
    with os.fdopen(int(arguments[1]), "w") as answers:
        serve(json.loads(arguments[0]), sys.stdin, answers)
    return 0
