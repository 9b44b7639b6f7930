"""python -m tests.mutants: takes each wait, event and lifetime hold out of the transfer code, one at a time.

Tests must fail for each. A mutant is a copy of the repository with one change:

- a statement that makes a stream or the host wait, or that tells torch's allocator of a stream, is left out;
- an event is one that was never recorded, so that whoever waits for it does not wait;
- an event has passed when somebody asks, whether it has or not;
- a host slot is given back as if no copy used it any more;
- a copy does not know of the copy that it has to come after;
- a function of the bookkeeping is not marked `@uninterrupted`, so that an interrupt comes between any two lines of
  it, and of what it calls;
- the manager's turn is not taken, or not given, or what was dropped meanwhile is not given up;
- ranks that share do not exclude each other, or take the dead for alive;
- a planned policy does not keep its budget where a step is not as planned, or expects less than the recorded one
  had where a step begins with less; its planner does not know when copies end, or brings a block back before others
  that are used earlier; or nobody expects what comes at once when a layer is computed again.

Those without a mark are left out unless --marks is given: test_interrupt_sweep.py, which has to find them, shows in
one run that it would fail without any one of the marks.

The tests run on the emulated NPU with its race detector. mutants.txt lists all mutants, so that none is lost when
code moves or a method is renamed: --list writes it anew. It also says which file of tests has found a mutant, and
that file runs first; --learn writes what a run has found.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import cache_from_source
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.forked import in_forks

ROOT = Path(__file__).parent.parent
WAITS = ("wait_event", "hold", "synchronize", "record_stream", "_wait_for_work", "wait", "wait_for", "_wait_for")
TURNS = ("take", "give", "free_dropped", "watch")


@dataclass(frozen=True)
class Subject:
    """Files that are changed, and the tests that have to find it.

    looped: functions that are called until there is nothing to wait for. Without their waits of the host the loop
    only turns faster. calls: those that are left out, by name. values: calls of which another value is used, by
    name; {0} is the first argument.
    """

    files: Sequence[str]
    tests: Sequence[str]
    looped: Sequence[str] = ()
    calls: Sequence[str] = WAITS
    values: Mapping[str, str] = field(default_factory=dict)


def code(*names: str, folder: str = "") -> list[str]:
    return [f"tiered_mem/{folder}{name}.py" for name in names]


def found_by(*names: str, folder: str = "") -> list[str]:
    return [f"tests/{folder}test_{name}.py" for name in names]


WING = "activations/"
SAVED = (
    "dropped_blocks",
    "retained_copies",
    "offload_context",
    "saved_tensors",
    "saved_views",
    "changed_tensors",
    "recompute_races",
)
BLOCK_TESTS = [
    *found_by("transfer", "transfer_failures", folder="device/"),
    *found_by(*SAVED, "run_ahead", "spilling", folder=WING),
    *found_by("manager", folder="manager/"),
]
PHASES = ("module_phases", "module_phase_contents", "module_phase_lifetimes", "module_phase_failures")
SHELF = code("shelf", folder="tiers/")
COPIES = [*code("transfer", folder="device/"), *code("host_tier", folder="tiers/"), *code("manager")]
OPTIMIZER = ("pipeline", "window", "states", "bucket", "step_in_backward", "step_in_forward")
OPTIMIZER_TESTS = found_by(
    *("streams", "residence", "disk_residence", "overlap_forward", "overlap_backward"), folder="optimizer/"
)
PLANS = {
    "_copies_end": "ready",
    "_running_maxima": "{0}",
    "_guard": "[]",
    "_expected": "{2}",
    "_with_room": "sorted({0}.backwards)",
    "_replace": "variant",
}
PLANNING = [
    *code("planner", "copies", folder="policies/planning/"),
    *code("player", "treatments", "repertoire", folder="policies/planning/"),
]
TURN_TESTS = [
    *found_by("manager", folder="manager/"),
    *found_by("dropped_blocks", "abandoned_graphs", folder=WING),
    *found_by("interrupts", "interrupt_sweep", folder="ground/"),
]
SUBJECTS = (
    Subject(COPIES, (*BLOCK_TESTS, *OPTIMIZER_TESTS)),
    Subject(code("store", "block", folder=WING), BLOCK_TESTS),
    Subject(
        [*code("turn", folder="ground/"), *code("driver", "hooks", folder=WING)],
        TURN_TESTS,
        calls=TURNS,
    ),
    Subject(
        code("spiller", folder=WING), found_by("spilling", "lru_policy", "spill_faults", folder=WING), ("wait",)
    ),
    Subject(code("modules", folder="phases/"), found_by(*PHASES, folder="phases/")),
    Subject([*SHELF, *code(*OPTIMIZER, folder="optimizer/")], OPTIMIZER_TESTS, ("wait",)),
    Subject(
        code("node_file", folder="tiers/"),
        found_by("node_share", folder="tiers/"),
        calls=("_lock", "register_at_fork"),
        values={"_held": "True"},
    ),
    Subject(
        PLANNING,
        found_by("planner", "planned_policy", "planned_policy_deviations", "treatments", folder="policies/"),
        calls=(),
        values=PLANS,
    ),
)
INTERRUPTS = ("tests/ground/test_interrupt_sweep.py::test_no_line_of_the_bookkeeping_sees_an_interrupt",)
COPIED = (
    *("tiered_mem", "allocators", "policies", "tests", "emulator/tests", "examples", "benchmarks"),
    *("pyproject.toml", "README.md"),
)
LIST = Path(__file__).with_suffix(".txt")
FOUND_BY = "  <-  "
# pytest's exit codes. An interrupt that comes out of a test may end pytest itself.
PASSED = 0
FAILED = (1, 2, 3)


@dataclass(frozen=True)
class Mutant:
    """One change: the text of `node` in `file` becomes `replacement`. tests: those that have to find it.

    function: the name of the one that `node` stands in, with its class.
    """

    tests: Sequence[str]
    file: str
    function: str
    node: ast.expr | ast.stmt
    replacement: str

    def __str__(self) -> str:
        before = ast.unparse(self.node).splitlines()[0]
        return f"{self.file}: {self.function}: {before}  ->  {self.replacement}"

    def found_by(self, finder: str) -> Mutant:
        """With that file of tests first, if it is one of them."""
        return replace(self, tests=sorted(self.tests, key=lambda test: test != finder))

    def apply(self, folder: Path) -> None:
        path = folder / self.file
        lines = path.read_text().splitlines(keepends=True)
        node = self.node
        if node.end_lineno is None or node.end_col_offset is None:
            raise ValueError(f"{self} has no end")
        head = lines[node.lineno - 1].encode()[: node.col_offset].decode()
        tail = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        lines[node.lineno - 1 : node.end_lineno] = [head + self.replacement + tail]
        # Other copies of the repository share the file, and what Python has compiled of it.
        path.unlink()
        Path(cache_from_source(str(path))).unlink(missing_ok=True)
        path.write_text("".join(lines))


def mutants() -> list[Mutant]:
    waits = (mutant for subject in SUBJECTS for file in subject.files for mutant in _mutants_of(file, subject))
    product = sorted(path.relative_to(ROOT) for path in (ROOT / "tiered_mem").rglob("*.py"))
    return [*waits, *(mutant for file in product for mutant in _unmarked(str(file)))]


def _unmarked(file: str) -> Iterator[Mutant]:
    for name, function in _functions(ast.parse((ROOT / file).read_text())):
        for mark in function.decorator_list:
            if isinstance(mark, ast.Name) and mark.id == "uninterrupted":
                yield Mutant(INTERRUPTS, file, name, mark, "(lambda function: function)")


def _functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Those of a file with their names, an inner one before the one that it stands in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{outer}{node.name}"
            yield from _functions(node, f"{name}.")
            if isinstance(node, ast.FunctionDef):
                yield name, node
        else:
            yield from _functions(node, outer)


def _mutants_of(file: str, subject: Subject) -> Iterator[Mutant]:
    seen: set[ast.AST] = set()
    for name, function in _functions(ast.parse((ROOT / file).read_text())):
        of = partial(Mutant, subject.tests, file, name)
        for node in ast.walk(function):
            if node in seen:
                continue
            seen.add(node)
            if isinstance(node, ast.While) and _calls(node.body, subject.calls):
                seen.update(node.body)  # without what it waits for the loop would not end
                yield of(node, "pass")
            elif isinstance(node, ast.Expr) and _calls([node], subject.calls):
                if function.name not in subject.looped:
                    yield of(node, "pass")
            elif isinstance(node, ast.Call) and (value := subject.values.get(_called(node) or "")) is not None:
                yield of(node, value.format(*map(ast.unparse, node.args)))
            else:
                yield from _mutants_at(node, of)


def _mutants_at(node: ast.AST, of: Callable[[ast.expr | ast.stmt, str], Mutant]) -> Iterator[Mutant]:
    if isinstance(node, ast.Assign) and _attribute(node.value) == "ticket":
        yield of(node.value, "None")
    elif isinstance(node, ast.Tuple | ast.List) and isinstance(node.ctx, ast.Load):
        yield from (of(part, "None") for part in node.elts if _attribute(part) == "ticket")
    elif isinstance(node, ast.ListComp) and _attribute(node.elt) == "ticket":
        yield of(node.elt, "None")
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "query":
            yield of(node, "True")
        elif node.func.attr == "record_event":
            yield of(node, f"__import__('torch').Event({ast.unparse(node.func.value)}.device)")
        elif node.func.attr == "release" and len(node.args) == 2:
            yield from (of(part, "None") for part in node.args[1:] if not _is_none(part))


def _calls(statements: Sequence[ast.stmt], names: Sequence[str]) -> bool:
    """Whether one of the statements is nothing but such a call."""
    return any(isinstance(each, ast.Expr) and _called(each.value) in names for each in statements)


def _called(node: ast.expr) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    return node.func.id if isinstance(node.func, ast.Name) else _attribute(node.func)


def _attribute(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else None


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def import_once() -> None:
    """Imports what takes long, and is the same for all: tests run in forks of this process.

    Nothing uses the device before a fork, and nothing of the code under test is imported.
    """
    importlib.import_module("emulator.tests.emulated_device").start()
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


def copy_repository(folder: Path) -> None:
    for name in COPIED:
        source, copy = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)


def run_tests(tests: Sequence[str], folder: Path, scratch: Path) -> int:
    """pytest's exit code, for a fork that does nothing else. scratch: a folder that is made for what it writes."""
    scratch.mkdir()
    with (scratch / "output.txt").open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.chdir(folder)
    sys.path[0] = str(folder)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "emulator")]:
        del sys.modules[name]
    # Without a wait, or with the turn taken for ever, it may hang in torch, where no signal would reach it.
    options = ("-x", "-q", "-m", "not slow", "--timeout=120", "--timeout-method=thread")
    imported = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    places = ("-p", "no:cacheprovider", f"--basetemp={scratch / 'tests'}")
    return pytest.main([*options, "-W", imported, *places, *tests])


def check(original: Path, jobs: int) -> None:
    """Raises SystemExit, with what pytest has written, if a test fails without a change.

    On the way Python compiles what is in the folder, and mutants share that.
    """
    tests = [*INTERRUPTS, *dict.fromkeys(test for subject in SUBJECTS for test in subject.tests)]
    places = [original.with_name(f"check-{number}") for number in range(jobs)]
    calls = (
        (place, partial(run_tests, tests[number::jobs], original, place)) for number, place in enumerate(places)
    )
    failed = [(place / "output.txt").read_text() for place, code in in_forks(calls, jobs) if code != PASSED]
    if failed:
        sys.exit("\n".join([*failed, "mutants: the tests fail already without a mutation"]))


class Fate(NamedTuple):
    """finder: the file with the test that has failed; "" where none has, or where pytest could not say."""

    mutant: Mutant
    dead: bool
    finder: str

    def __str__(self) -> str:
        return f"{'dies' if self.dead else 'SURVIVES':8}  {listed(str(self.mutant), self.finder)}"


def fates(chosen: Sequence[Mutant], original: Path, jobs: int) -> Iterator[Fate]:
    """As they end."""

    def calls() -> Iterator[tuple[tuple[Mutant, Path], Callable[[], int]]]:
        for number, mutant in enumerate(chosen):
            folder = original.with_name(str(number))
            shutil.copytree(original, folder, symlinks=True, copy_function=os.link)
            mutant.apply(folder)
            yield (mutant, folder), partial(run_tests, mutant.tests, folder, folder / "scratch")

    for (mutant, folder), code in in_forks(calls(), jobs):
        killed = code < 0  # by a signal, as where memory goes that a thread still writes to
        if code not in (PASSED, *FAILED) and not killed:
            raise RuntimeError(f"pytest ended with {code}; {mutant} could not be tested")
        failed = re.search(
            r"^(?:FAILED|ERROR) (tests/[^:\s]+)", (folder / "scratch/output.txt").read_text(), re.MULTILINE
        )
        shutil.rmtree(folder)
        yield Fate(mutant, code != PASSED, failed[1] if failed else "")


def listed(name: str, finder: str) -> str:
    """A line of mutants.txt."""
    return f"{name}{FOUND_BY}{finder}" if finder else name


def write_list(names: Sequence[str], finders: Mapping[str, str]) -> None:
    LIST.write_text("".join(f"{listed(name, finders.get(name, ''))}\n" for name in names))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedule", default="eager", choices=("eager", "late", "random"))
    parser.add_argument("--sample", type=int, metavar="N", help="only N of them, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--marks", action="store_true", help="also those without a mark `@uninterrupted`")
    parser.add_argument("--learn", action="store_true", help=f"write what has found each into {LIST.name}")
    parser.add_argument("--list", action="store_true", help=f"write {LIST.name}, and end")
    options = parser.parse_args()
    chosen = mutants()
    names = sorted(map(str, chosen))
    lines = [line.partition(FOUND_BY) for line in LIST.read_text().splitlines()]
    finders = {name: finder for name, _, finder in lines}
    if options.list:
        write_list(names, finders)
        return
    before = Counter(name for name, *_ in lines)
    if before != Counter(names):
        lost, new = before - Counter(names), Counter(names) - before
        text = [*(f"gone  {name}" for name in lost.elements()), *(f"new   {name}" for name in new.elements())]
        sys.exit("\n".join(["mutants: not those of mutants.txt; --list writes it anew", *text]))
    chosen = [
        mutant.found_by(finders[str(mutant)]) for mutant in chosen if options.marks or mutant.tests != INTERRUPTS
    ]
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    os.environ |= {"ASCEND_EMULATOR_SCHEDULE": options.schedule, "ASCEND_EMULATOR_RACES": "1"}
    import_once()
    survivors = 0
    with tempfile.TemporaryDirectory() as temporary:
        original = Path(temporary) / "original"
        copy_repository(original)
        check(original, options.jobs)
        for number, fate in enumerate(fates(chosen, original, options.jobs), 1):
            print(f"{number:3} of {len(chosen)}  {fate}", flush=True)
            survivors += not fate.dead
            finders[str(fate.mutant)] = fate.finder or finders[str(fate.mutant)]
    if options.learn:
        write_list(names, finders)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants die")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
