"""Everything that is to be known of a machine with a device, by one command, within nine minutes: `make silicon`.

Runs `tiered-mem check`, the tests that use the device, and the benchmarks, each in a process of its own with a time
limit, and writes one JSON file with every figure. It needs torch and what tiered_mem needs, and no network, no
emulator, no installation: run it in the checkout. What needs a package that is not installed, or what runs out of
time, is written down as such. Time that one part leaves over is the next ones'.

    python -m benchmarks.silicon --device cuda
    python -m benchmarks.silicon --device cpu --small     # a look at the program itself

The exit status is 1 if a test failed, a figure could not be had, or a number was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PRODUCT = ("torch", "numpy", "psutil")
SECONDS = 520
_TAIL = 3000
_NO_TESTS = 5  # pytest's status where all files are skipped
# Other people's warnings end no test here: their versions are not ours to choose.
OTHERS_WARNINGS = ("DeprecationWarning", "FutureWarning", "UserWarning")
_OF_PYTEST = ("pytest.PytestUnraisableExceptionWarning", "pytest.PytestUnhandledThreadExceptionWarning")


@dataclass(frozen=True)
class Part:
    """arguments: of python. share: of the time. needs: packages. on_cpu: whether it means something there.

    output: the option that names the file for its figures.
    """

    name: str
    arguments: tuple[str, ...]
    share: int
    needs: tuple[str, ...] = PRODUCT
    on_cpu: bool = True
    output: str = "--json"

    @property
    def tests(self) -> bool:
        return "pytest" in self.needs


def files(folder: str, *names: str) -> list[str]:
    return [f"tests/{folder}/test_{name}.py" for name in names]


def tests_of(name: str, share: int, *paths: str) -> Part:
    arguments = [*("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "benchmarks.counted_tests")]
    arguments += ["-o", "faulthandler_timeout=60"]
    for each in OTHERS_WARNINGS:
        arguments += ["-W", f"default::{each}"]
    for each in _OF_PYTEST:
        arguments += ["-W", f"error::{each}"]
    return Part(f"tests: {name}", (*arguments, *paths), share, (*PRODUCT, "pytest"))


def parts(kind: str, small: bool) -> list[Part]:
    """What is to run, the most important first."""
    device = ("--device", kind)
    quick = ("--small",) if small else ()
    rich = (*PRODUCT, "rich")

    def benchmark(name: str, share: int, *small_size: str, full_size: tuple[str, ...] = ()) -> Part:
        size = small_size if small else full_size
        return Part(name, ("-m", f"benchmarks.{name}", *size), share, needs=rich, on_cpu=False)

    saved = (
        "saved_tensors",
        "saved_views",
        "changed_tensors",
        "wrapper_tensors",
        "dropped_blocks",
        "retained_copies",
    )
    layers = ("layer_context", "nested_layers", "checkpointed_layers", "hard_graphs", "plain_context", "recompute")
    states = ("equality", "phases", "streams", "residence", "checkpoints", "overlap_backward", "overlap_forward")
    tests = [
        tests_of("device and copies", 25, *files("device", "device", "transfer", "transfer_failures")),
        tests_of("host memory", 25, *files("tiers", "torch_memory", "host_memory"), *files("cli", "link")),
        tests_of(
            *("activations", 60, *files("manager", "manager")),
            *files("activations", "offload_context", *saved, *layers, "training_loops"),
        ),
        tests_of("optimizer", 80, *files("optimizer", *states)),
        tests_of("phases", 25, *files("phases", "module_phases", "module_phase_contents")),
        tests_of("disk tier", 25, *files("activations", "spilling"), *files("optimizer", "disk_residence")),
        tests_of("Transformer Engine's interface", 40, "tests/cpu_offload"),
        tests_of("traces", 15, *files("trace", "trace", "trace_export", "trace_files")),
    ]
    if small:
        tests = [
            tests_of("phases", 25, *files("phases", "module_phase_contents")),
            tests_of("traces", 15, *files("trace", "trace_files")),
        ]
    check = ("-m", "tiered_mem", "check", *device, *(("--quick",) if small else ()))
    return [
        Part("tiered-mem check", check, 60, needs=rich, output="-o"),
        Part("llama_step", ("-m", "benchmarks.llama_step", *device, *quick), 90),
        benchmark("link_speed", 30, "--size", "4MiB", "--rounds", "3"),
        *tests,
        benchmark("offload_overhead", 30, "--layers", "4", "--offload", "2", "--context", "64", "--repeats", "3"),
        benchmark("offload_hooks", 50, "--layers", "4", "--context", "64", "--rounds", "2", "--warmup", "1"),
        benchmark(
            *("optimizer_step", 50, "--layers", "2", "--width", "128", "--rounds", "2", "--bucket", "1MiB"),
            full_size=("--layers", "4", "--rounds", "3", "--steps", "2"),  # the drive may be a slow one
        ),
    ]


def main() -> int:
    options = parse()
    began = time.monotonic()
    environment = os.environ | {"TIERED_MEM_TEST_DEVICE": options.device, "PYTHONUNBUFFERED": "1"}
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS need not repeat itself
    if options.device != "npu":
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    result: dict[str, object] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "small": options.small,
        **machine(options.device, environment),
        "parts": [],
    }
    path = options.output or RESULTS / file_name(str(result["device"]), options.small)
    path.parent.mkdir(parents=True, exist_ok=True)
    todo = parts(options.device, options.small)
    done: list[dict[str, object]] = []
    for number, part in enumerate(todo):
        left = options.seconds - (time.monotonic() - began)
        shares = sum(each.share for each in todo[number:] if not why_not(each, options.device))
        limit = max(1.0, left * part.share / max(shares, part.share))
        print(f"{part.name}: {limit:.0f} s at most", flush=True)
        done.append(run(part, options.device, environment, limit))
        print(f"  {done[-1]['outcome']}{said(done[-1])}", flush=True)
        result |= {"parts": done, "tests": totals(done), "seconds": round(time.monotonic() - began, 1)}
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['tests']}\n{path}")
    return 0 if all(each["outcome"] in ("done", "not run") for each in done) else 1


def machine(kind: str, environment: dict[str, str]) -> dict[str, object]:
    """What this machine is. Ends the process where it has no such device."""
    command = [sys.executable, "-m", "benchmarks.machine", "--device", kind]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        sys.exit(f"silicon: torch did not find out about {kind} within two minutes")
    if done.returncode:
        sys.exit(f"silicon: {done.stderr.strip().splitlines()[-1]}; see --device, and PYTHON of make")
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(part: Part, kind: str, environment: dict[str, str], limit: float) -> dict[str, object]:
    """What became of a part: its outcome is "done", "failed", "out of time" or "not run", with the reason."""
    told: dict[str, object] = {"name": part.name, "command": " ".join(("python", *part.arguments))}
    if why := why_not(part, kind):
        return told | {"outcome": "not run", "why": why}
    with tempfile.TemporaryDirectory(prefix="silicon-") as folder:
        found = Path(folder) / "found.json"
        arguments = [*part.arguments, "--outcomes" if part.tests else part.output, str(found)]
        with (Path(folder) / "log").open("w+") as log:
            began = time.monotonic()
            temporary = environment | {"TMPDIR": folder}
            status = status_of([sys.executable, *arguments], temporary, limit, log.fileno())
            told |= {"seconds": round(time.monotonic() - began, 1), "limit": round(limit, 1)}
            log.seek(0)
            text = log.read()
        fine = (0, _NO_TESTS) if part.tests else (0,)
        outcome = "out of time" if status is None else "done" if status in fine else "failed"
        if found.exists() and part.tests:
            told |= outcomes(found)
        elif found.exists() and status is not None:
            told["figures"] = json.loads(found.read_text())
        elif outcome == "done":
            outcome = "failed"  # it has told nothing
    told["outcome"] = outcome
    if outcome != "done":
        told |= {"status": status, "output": text[-_TAIL:]}
    return told


def why_not(part: Part, kind: str) -> str:
    """Why a part cannot run here; "" if it can."""
    if kind == "cpu" and not part.on_cpu:
        return "it measures a device's link"
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    return f"not installed here: {', '.join(missing)}" if missing else ""


def status_of(
    command: Sequence[str], environment: dict[str, str], limit: float, log: int, folder: Path = ROOT
) -> int | None:
    """The exit status of a process; None if it did not end in time. Nothing that it started is left."""
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def outcomes(path: Path) -> dict[str, object]:
    """Of tests: how many passed, failed and so on, and the names of those that did not pass, with the reason."""
    # A process that was killed may have left half a line.
    lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {
        "counts": dict(Counter(line["outcome"] for line in lines)),
        "not_passed": [line for line in lines if line["outcome"] != "passed"],
    }


def totals(done: Sequence[dict[str, object]]) -> dict[str, int]:
    """Of the tests of all parts."""
    total: Counter[str] = Counter()
    for each in done:
        counts = each.get("counts")
        if isinstance(counts, dict):
            total.update(counts)
    return dict(total)


def said(told: dict[str, object]) -> str:
    words = [str(told[name]) for name in ("why", "counts") if name in told]
    return f": {', '.join(words)}" if words else ""


def file_name(device: str, small: bool) -> str:
    today = datetime.date.today().isoformat()
    return f"{re.sub('[^a-z0-9]+', '-', device.lower())}-{today}{'-small' if small else ''}.json"


def commit() -> str | None:
    """Of the checkout; None where git does not tell."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "npu", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes and few tests")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of it")
    parser.add_argument("--output", type=Path, help="the file; by default one in benchmarks/results/")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
