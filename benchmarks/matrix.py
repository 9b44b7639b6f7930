"""One combination of Python, torch and torch_npu: `make matrix TORCH=2.12 PYTHON=python3.12`.

    python3 -m benchmarks.matrix --torch 2.12 --python python3.12

In a folder of its own it copies what git tracks, installs the versions, compiles the emulator against them where
there is a torch_npu of that torch, and runs the tests: those of tiered_mem on the CPU and on the emulated NPU, and
the emulator's. The result is a file in benchmarks/results/versions, and docs/versions.md is made anew of them
all. Failing tests are what it is for: the exit status is 1 only where no test could be run. It needs
Python 3.11 and no package.

With --quick it runs a few of the tests, in a tenth of the time, and the file is in build/matrix. The exit status is
then 1 where one fails. With --part it runs that part alone, and the file keeps what it had of the others.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import versions_page
from benchmarks.silicon import OTHERS_WARNINGS, outcomes, status_of
from benchmarks.versions_page import PARTS, RESULTS, release

ROOT = Path(__file__).parents[1]
# They look at the code and not at what it runs with.
NOT_INSTALLED = ("mypy", "ruff", "types-psutil")
HANGS_S = 3600.0
# What calls torch_npu and torch's private names most directly.
QUICK = {
    "emulator": tuple(f"emulator/tests/test_{name}.py" for name in ("memory", "startup", "streams", "gradients")),
    "npu": (
        *("tests/device", "tests/manager/test_manager.py", "tests/optimizer/test_equality.py"),
        *("tests/activations/test_offload_context.py", "tests/activations/test_recompute.py"),
        *("tests/tiers/test_torch_memory.py", "tests/tiers/test_host_memory.py"),
    ),
}
_TAIL = 2000


def main() -> int:
    options = parse()
    folder = ROOT / "build" / "matrix" / f"torch-{options.torch}-{Path(options.python).name}"
    made = Installation(folder, options.python, options.torch)
    versions = made.versions()
    done = []
    for part, paths in parts(versions["torch_npu"], options.quick).items():
        if options.part in (None, part):
            print(f"{part}: tests", flush=True)
            done.append(made.tests(part, paths, options.jobs))
            print(f"  {done[-1]['counts']}", flush=True)
    if not options.keep:
        shutil.rmtree(folder)
    results = folder.parent if options.quick else RESULTS
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"torch-{release(versions)}-python-{versions['python']}.json"
    kept = [] if options.part is None else others(path, versions, options.part)
    path.write_text(json.dumps({**versions, "parts": [*kept, *done]}, indent=1) + "\n")
    print(path)
    if not options.quick:
        versions_page.main([])  # a test wants it to be that of the files
    failed = [each for part in done for each in part["failed"] if options.quick]
    for each in failed:
        print(f"{each['test']}: {each['why']}")
    return 1 if failed or not all(each["counts"].get("passed") for each in done) or not done else 0


def parts(torch_npu: str | None, quick: bool) -> dict[str, tuple[str, ...]]:
    """Which tests there are to run."""
    if quick:
        return QUICK
    on_npu = {"emulator": ("emulator/tests",), "npu": ("tests",)}
    return {"cpu": ("tests",)} | ({} if torch_npu is None else on_npu)


def others(path: Path, versions: dict[str, str | None], part: str) -> list[dict[str, Any]]:
    """The other parts of an earlier run with the same versions."""
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())
    if any(earlier[name] != version for name, version in versions.items()):
        return []
    return [each for each in earlier["parts"] if each["part"] != part]


class Installation:
    """A copy of the checkout with an environment of its own. Raises SystemExit where pip or make fails.

    torch: its version, such as "2.12". torch_npu is installed where pip has one of the same version.
    """

    def __init__(self, folder: Path, python: str, torch: str) -> None:
        self._tree = folder / "tree"
        self._python = folder / "venv" / "bin" / "python"
        shutil.rmtree(folder, ignore_errors=True)
        self._copy()
        step("an environment", python, "-m", "venv", str(folder / "venv"))
        self._pip("setuptools>=77,<81", "wheel")
        wheel = self._torch_npu(torch)
        # Each wants one torch, some a build of it that only torch's own index has. It is the same interface.
        self._pip(f"torch=={torch}.*" if wheel is None else f"torch=={torch_of(wheel)}", *tools())
        if wheel is not None:
            emulator = str(self._tree / "emulator")
            self._pip("--no-deps", str(wheel))
            make = ("make", "-C", emulator, f"--jobs={os.cpu_count()}", f"PYTHON={self._python}")
            step("compiling the emulator", *make)
            self._pip("--no-deps", "--no-build-isolation", "--editable", emulator)
        self._pip("--no-deps", "--no-build-isolation", "--editable", str(self._tree))

    def versions(self) -> dict[str, str | None]:
        code = (
            "import json, platform, importlib.metadata as m\n"
            "have = {d.metadata['Name'].replace('-', '_'): d.version for d in m.distributions()}\n"
            "found = {name: have.get(name) for name in ('tiered_mem', 'torch', 'torch_npu')}\n"
            "print(json.dumps(found | {'python': platform.python_version()}))"
        )
        found: dict[str, str | None] = json.loads(step("versions", str(self._python), "-c", code))
        return found

    def tests(self, part: str, paths: Sequence[str], jobs: int) -> dict[str, Any]:
        """How many passed, failed and were skipped, and the names of those that did not pass."""
        found, log = self._tree.parent / f"{part}.jsonl", self._tree.parent / f"{part}.log"
        found.unlink(missing_ok=True)
        environment = os.environ | {"TIERED_MEM_TEST_DEVICE": "cpu" if part == "cpu" else "npu"}
        for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "ASCEND_EMULATOR_RACES", "ASCEND_EMULATOR_SCHEDULE"):
            environment.pop(name, None)
        if races := part == "npu" and self._can_look_for_races():
            environment["ASCEND_EMULATOR_RACES"] = "1"
        command = [str(self._python), "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
        command += ["-p", "benchmarks.counted_tests", "--outcomes", str(found)]
        command += [f"--numprocesses={jobs}", "--dist=loadfile"]
        for name in OTHERS_WARNINGS:
            command += ["-W", f"default::{name}"]
        command += paths
        began = time.monotonic()
        with log.open("w") as said:
            status = status_of(command, environment, HANGS_S, said.fileno(), self._tree)
        told = outcomes(found) if found.exists() else {"counts": {}, "not_passed": []}
        failed = [each for each in told["not_passed"] if each["outcome"] != "skipped"]
        for each in failed:
            each["why"] = each["why"].replace(f"{self._tree.parent}/", "")  # no path of this machine's
        end = {} if told["counts"] else {"output": log.read_text(errors="replace")[-_TAIL:]}
        return {
            "part": part,
            "date": datetime.date.today().isoformat(),
            "races": races,
            "quick": part in QUICK and paths == QUICK[part],
            "status": status,
            "seconds": round(time.monotonic() - began),
            "counts": told["counts"],
            "failed": failed,
            **end,
        }

    def _copy(self) -> None:
        for name in step("what git tracks", "git", "-C", str(ROOT), "ls-files", "-z").split("\0"):
            source, target = ROOT / name, self._tree / name
            if name and (source.is_symlink() or source.exists()):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)

    def _pip(self, *arguments: str) -> None:
        pip = (str(self._python), "-m", "pip", "install", "--no-compile")
        step(f"pip install {' '.join(arguments)}", *pip, *arguments)

    def _torch_npu(self, torch: str) -> Path | None:
        """The newest wheel of that version; None where there is none."""
        wheels = self._tree.parent / "wheels"
        pip = (str(self._python), "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels))
        done = subprocess.run([*pip, f"torch_npu=={torch}.*"], capture_output=True)
        return next(wheels.glob("torch_npu-*.whl")) if done.returncode == 0 else None

    def _can_look_for_races(self) -> bool:
        code = "from ascend_emulator.startup import can_look_for_races; print(can_look_for_races())"
        return step("the race detector", str(self._python), "-c", code) == "True\n"


def torch_of(wheel: Path) -> str:
    """The version of torch for which a torch_npu was built, which its own begins with: 2.10.0.post7."""
    return wheel.name.split("-")[1].partition(".post")[0]


def tools() -> list[str]:
    """What tiered_mem and its tests need beside torch."""
    import tomllib  # of Python 3.11; the tests of what is here run with 3.10, too

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return [each for each in names if re.split(r"[=<>\[]", each)[0] not in (*NOT_INSTALLED, "torch")]


def step(what: str, *command: str) -> str:
    """Runs it and returns what it prints. Ends the process where it fails, with its last words."""
    print(what, flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(
            f"matrix: {' '.join(command)} ended with {done.returncode}: {(done.stdout + done.stderr)[-_TAIL:]}"
        )
    return done.stdout


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", required=True, help="its version, such as 2.12")
    parser.add_argument("--python", default="python3", help="the command of a Python, such as python3.12")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests")
    parser.add_argument("--quick", action="store_true", help="a few of the tests")
    parser.add_argument("--part", choices=sorted(PARTS), help="these tests alone")
    parser.add_argument("--keep", action="store_true", help="leave the folder, which has several GiB")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
