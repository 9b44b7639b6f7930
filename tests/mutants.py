"""python -m tests.mutants: takes each wait, event and lifetime hold out of the transfer code, one at a time.

Tests must fail for each. A mutant is a copy of the repository with one change:

- a statement that makes a stream or the host wait, or that tells torch's allocator of a stream, is left out;
- an event is one that was never recorded, so that whoever waits for it does not wait;
- an event has passed when somebody asks, whether it has or not;
- a host slot is given back as if no copy used it any more;
- a copy does not know of the copy that it has to come after;
- a function of the bookkeeping is not marked `@uninterrupted`, so that an interrupt comes between any two lines of
  it, and of what it calls.

The tests run on the emulated NPU with its race detector.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Subject:
    """Files that are changed, and the tests that have to find it.

    looped: functions that are called until there is nothing to wait for. Without their waits of the host the loop
    only turns faster.
    """

    files: Sequence[str]
    tests: Sequence[str]
    looped: Sequence[str] = ()


def code(*names: str, folder: str = "") -> list[str]:
    return [f"tiered_mem/{folder}{name}.py" for name in names]


def found_by(*names: str, folder: str = "") -> list[str]:
    return [f"tests/{folder}test_{name}.py" for name in names]


BLOCKS = ("transfer", "transfer_failures", "dropped_blocks", "offload_context", "manager")
SAVED = ("saved_tensors", "saved_views", "changed_tensors")
PHASES = ("module_phases", "module_phase_contents", "module_phase_lifetimes", "module_phase_failures")
OPTIMIZER = ("pipeline", "states", "bucket_mover", "residence", "disk_residence", "staging", "staging_slots")
OPTIMIZER_TESTS = found_by("streams", "residence", "disk_residence", folder="optimizer/")
SUBJECTS = (
    Subject(code("transfer", "store", "tiers", "manager"), (*found_by(*BLOCKS, *SAVED), *OPTIMIZER_TESTS)),
    Subject(code("spiller", "wanted"), found_by("spilling", "lru_policy", "spill_faults"), ("wait",)),
    Subject(code("module_phases"), found_by(*PHASES)),
    Subject(code(*OPTIMIZER, folder="optimizer/"), OPTIMIZER_TESTS, ("wait", "_wait_for_write")),
)
INTERRUPTS = ("tests/test_interrupts.py::test_no_line_of_the_bookkeeping_sees_an_interrupt",)
COPIED = ("tiered_mem", "allocators", "policies", "tests", "examples", "benchmarks", "pyproject.toml", "README.md")
WAITS = ("wait_event", "hold", "synchronize", "record_stream", "_wait_for_work", "wait", "wait_for")
# pytest's exit codes. An interrupt that comes out of a test may end pytest itself.
PASSED = 0
FAILED = (1, 2, 3)


@dataclass(frozen=True)
class Mutant:
    """One change: the text of `node` in `file` becomes `replacement`. tests: those that have to find it."""

    tests: Sequence[str]
    file: str
    node: ast.expr | ast.stmt
    replacement: str

    def __str__(self) -> str:
        before = ast.unparse(self.node).splitlines()[0]
        return f"{self.file}:{self.node.lineno}: {before}  ->  {self.replacement}"

    def apply(self, folder: Path) -> None:
        path = folder / self.file
        lines = path.read_text().splitlines(keepends=True)
        node = self.node
        if node.end_lineno is None or node.end_col_offset is None:
            raise ValueError(f"{self} has no end")
        head = lines[node.lineno - 1].encode()[: node.col_offset].decode()
        tail = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        lines[node.lineno - 1 : node.end_lineno] = [head + self.replacement + tail]
        path.write_text("".join(lines))


def mutants() -> list[Mutant]:
    waits = (mutant for subject in SUBJECTS for file in subject.files for mutant in _mutants_of(file, subject))
    product = sorted(path.relative_to(ROOT) for path in (ROOT / "tiered_mem").rglob("*.py"))
    return [*waits, *(mutant for file in product for mutant in _unmarked(str(file)))]


def _unmarked(file: str) -> Iterator[Mutant]:
    tree = ast.parse((ROOT / file).read_text())
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for mark in function.decorator_list:
            if isinstance(mark, ast.Name) and mark.id == "uninterrupted":
                yield Mutant(INTERRUPTS, file, mark, f"(lambda function: function)  # {function.name}")


def _mutants_of(file: str, subject: Subject) -> Iterator[Mutant]:
    of = partial(Mutant, subject.tests, file)
    tree = ast.parse((ROOT / file).read_text())
    looped = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in subject.looped]
    pointless = {node for function in looped for node in ast.walk(function) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if node in pointless:
            continue
        if isinstance(node, ast.Expr) and _called(node.value) in WAITS:
            yield of(node, "pass")
        elif isinstance(node, ast.Assign) and _attribute(node.value) == "ticket":
            yield of(node.value, "None")
        elif isinstance(node, ast.Tuple | ast.List) and isinstance(node.ctx, ast.Load):
            yield from (of(part, "None") for part in node.elts if _attribute(part) == "ticket")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "query":
                yield of(node, "True")
            elif node.func.attr == "record_event":
                yield of(node, f"__import__('torch').Event({ast.unparse(node.func.value)}.device)")
            elif node.func.attr == "release" and len(node.args) == 2:
                yield from (of(part, "None") for part in node.args[1:] if not _is_none(part))


def _called(node: ast.expr) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    return node.func.id if isinstance(node.func, ast.Name) else _attribute(node.func)


def _attribute(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else None


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def run_tests(folder: Path, tests: Sequence[str], schedule: str) -> int:
    """pytest's exit code."""
    environment = os.environ | {"ASCEND_EMULATOR_SCHEDULE": schedule, "ASCEND_EMULATOR_RACES": "1"}
    options = ("-x", "-q", "-p", "no:cacheprovider", "--timeout=120")  # without a wait it may hang
    command = (sys.executable, "-m", "pytest", *options, *tests)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False).returncode


def dies(mutant: Mutant | None, schedule: str) -> bool:
    """Whether the tests fail with this change; None changes nothing."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)
        if mutant is not None:
            mutant.apply(folder)
        everything = [*INTERRUPTS, *(test for subject in SUBJECTS for test in subject.tests)]
        code = run_tests(folder, everything if mutant is None else mutant.tests, schedule)
    if code not in (PASSED, *FAILED):
        raise RuntimeError(f"pytest ended with {code}; {mutant or 'the code as it is'} could not be tested")
    return code in FAILED


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedule", default="eager", choices=("eager", "late", "random"))
    parser.add_argument("--sample", type=int, metavar="N", help="only N of them, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console()
    chosen = mutants()
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    if dies(None, options.schedule):
        sys.exit("mutants: the tests fail already without a mutation")
    survivors = []
    for mutant in track(chosen, description="mutants", console=console):
        if dies(mutant, options.schedule):
            console.print(f"dies      {mutant}", highlight=False, markup=False)
        else:
            survivors.append(mutant)
            console.print(f"SURVIVES  {mutant}", highlight=False, markup=False)
    console.print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants die")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
