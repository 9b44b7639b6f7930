"""What may import what, read off the source."""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from emulator.tests.launch import run

pytestmark = pytest.mark.once(why="it needs no device")

ROOT = Path(__file__).parents[2]
LEAVES = ("allocators", "policies")
# What uses the ground floor for something of its own; none of them knows of another.
WINGS = ("activations", "optimizer", "phases")
PACKAGES = ("check", "device", "ground", "pictures", "spill", "tiers", "trace", *WINGS)
FOLDERS = (
    "tiered_mem",
    "tiered_mem/cli",
    "tiered_mem/cpu_offload",
    "tiered_mem/integrations",
    *(f"tiered_mem/{package}" for package in PACKAGES),
    *LEAVES,
    "policies/planning",
)
PRODUCT = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))
DEPENDENCIES = {"torch", "numpy", "psutil", "safetensors", "xxhash"}
# What a leaf may import of the rest: sizes are read and written as text in one way.
BELOW_LEAF = {"policies": {"..ground.arguments", "..sizes"}, "allocators": {"..sizes"}}
# Of the command line alone, and of pictures.
FOR_PEOPLE = {"cli": {"rich"}, "metrics": {"prometheus_client"}, "pictures": {"matplotlib"}}
# What tiered_mem/spill/ may import of the rest: it knows addresses and files, and nothing of torch.
BELOW_SPILL = {"allocators", "errors", "sizes"}
ARGUMENTS = ROOT / "tiered_mem" / "ground" / "arguments.py"

# tiered_mem/ from the bottom up: each file or package may import those of the rows above its own, and the leaves.
ORDER = [
    ["sizes", "versions"],
    ["errors"],
    ["ground"],
    ["spill"],
    ["device"],
    ["trace", "tiers"],
    ["pictures", "rehearsal"],
    ["choose_policy"],
    ["agreement"],
    [*WINGS],
    ["report"],
    ["manager"],
    ["configuration", "check"],
    ["block_context", "metrics", "optim"],
    ["__init__"],
]
# The size of the house. A limit is raised by whoever adds a feature that users asked for, in the commit that adds
# it and by what it takes, and never to make room for a wall. What gets smaller lowers it.
FILES = 182
CODE_LINES = 23_219  # without blank lines, comments and docstrings
LONGEST = 500  # lines of a file, with all that is in it; where one is near to that, look for a second idea in it
# The manager is one class, whose methods pass each call on. Half of its lines say what users may type.
LONGER = {"tiered_mem/manager.py": 605}
FLOORS = 16  # the longest chain of imports, from a file that imports none of the others

# Runs the command line, of which nothing else here knows.
COMMAND = ROOT / "tiered_mem" / "__main__.py"


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(tree: ast.Module) -> Iterator[str]:
    """The modules that are imported anywhere in a file, a relative one with its dots: "torch.nn", ".block"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield "." * node.level + node.module
        elif isinstance(node, ast.ImportFrom):
            yield from ("." * node.level + alias.name for alias in node.names)


def top(module: str) -> str:
    return module.split(".")[0]


def names(tree: ast.Module, package: str) -> bool:
    """Whether code, not a comment or a docstring, speaks of a package: imports it, or has its name in a string."""
    literals = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return any(top(name) == package for name in (*imports(tree), *literals))


def calls(tree: ast.Module) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


@pytest.mark.parametrize("folder", LEAVES)
def test_leaves_import_the_standard_library_and_themselves(folder: str) -> None:
    """For typing too: what a leaf's signatures name, it depends on."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert len(paths) > 1
    inside = [path.relative_to(ROOT / folder) for path in paths]
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in inside}
    for path, place in zip(paths, inside, strict=True):
        up = "." * len(place.parents)  # to the leaf's own folder
        own = {up + module for module in modules} | {f".{other.stem}" for other in path.parent.glob("*.py")}
        own |= {up + name.removeprefix(".") for name in BELOW_LEAF.get(folder, set())}
        strange = {name for name in imports(tree_of(path)) if top(name) not in sys.stdlib_module_names} - own
        assert not strange, f"{path.relative_to(ROOT)} imports {strange}"


@pytest.mark.parametrize("name", sorted({name for names in BELOW_LEAF.values() for name in names}))
def test_what_lies_below_a_leaf_imports_the_standard_library_only(name: str) -> None:
    path = ROOT / "tiered_mem" / f"{name.lstrip('.').replace('.', '/')}.py"
    assert {top(name) for name in imports(tree_of(path))} <= sys.stdlib_module_names


def imported_files(path: Path) -> set[Path]:
    """The files of the product that a file imports."""
    found: set[Path] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            # A leaf is a package within tiered_mem, wherever its folder lies.
            inside = path.relative_to(ROOT).parent
            package = ROOT / "tiered_mem" / inside if inside.parts[0] in LEAVES else path.parent
            folder = package.parents[node.level - 2] if node.level > 1 else package
            base = folder.joinpath(*(node.module or "").split("."))
            places = [base / f"{alias.name}.py" for alias in node.names]
            if node.module:
                places += [base.with_suffix(".py"), base / "__init__.py"]
            found |= {place.resolve() for place in places if place.is_file()}
    return found - {path}


GRAPH = {path: imported_files(path) for path in PRODUCT}


def rooms(path: Path) -> set[str]:
    """What a file imports of the product, by the names in ORDER: its own package's files are left out."""
    return {room_of(other) for other in GRAPH[path]} - {room_of(path), *LEAVES, "planning"}


def room_of(path: Path) -> str:
    """A file of tiered_mem/ is a room by itself; what lies in a package is the package, and in a leaf the leaf."""
    if (leaf := path.relative_to(ROOT).parts[0]) in LEAVES:
        return leaf
    return path.stem if path.parent == ROOT / "tiered_mem" else path.parent.name


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert sum(map(len, GRAPH.values())) > 3 * len(PRODUCT)
    TopologicalSorter(GRAPH).prepare()  # raises CycleError, with the circle


def test_the_house_has_few_floors() -> None:
    floor: dict[Path, int] = {}
    for path in TopologicalSorter(GRAPH).static_order():
        floor[path] = 1 + max((floor[below] for below in GRAPH[path]), default=0)
    assert max(floor.values()) <= FLOORS, max(floor, key=floor.__getitem__)


def code_lines(source: str) -> int:
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docs.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = ((number, line.strip()) for number, line in enumerate(source.splitlines(), 1))
    return sum(number not in docs and line != "" and not line.startswith("#") for number, line in lines)


def test_the_house_is_no_larger_than_it_has_to_be() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in PRODUCT}
    assert len(sources) <= FILES
    assert sum(map(code_lines, sources.values())) <= CODE_LINES
    assert [name for name, source in sources.items() if len(source.splitlines()) > LONGER.get(name, LONGEST)] == []


def test_a_class_name_has_one_meaning() -> None:
    classes = Counter(
        node.name for path in PRODUCT for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, times in classes.items() if times > 1] == []


def test_tiered_mem_imports_downwards() -> None:
    """For typing too."""
    below: set[str] = set()
    for row in ORDER:
        for path in PRODUCT:
            if room_of(path) in row and path != COMMAND:
                strange = rooms(path) - below
                assert not strange, f"{path.relative_to(ROOT)} imports {strange}, which is not below it"
        below |= set(row)


def test_the_disk_tier_knows_nothing_of_torch() -> None:
    for path in sorted((ROOT / "tiered_mem" / "spill").glob("*.py")):
        strange = {top(name) for name in imports(tree_of(path)) if not name.startswith(".")}
        strange -= {*sys.stdlib_module_names, "numpy", "psutil", "xxhash"}
        strange |= {room_of(other) for other in GRAPH[path] - {ARGUMENTS}} - {"spill", *LEAVES, *BELOW_SPILL}
        assert not strange, f"{path.relative_to(ROOT)} imports {strange}"


def test_a_tier_below_the_host_is_known_by_its_seam_only() -> None:
    """Files are one such tier. The command line and whatever makes the default one know that."""
    concrete = {ROOT / "tiered_mem" / "spill" / f"{name}.py" for name in ("chosen", "disk_tier", "several_drives")}
    knowing = {room_of(path) for path in PRODUCT if concrete & GRAPH[path]}
    assert knowing == {"check", "cli", "manager", "spill"}


def test_nothing_in_tiered_mem_needs_the_drop_in_or_the_command_line() -> None:
    above = (".cpu_offload", ".cli", ".integrations", "tiered_mem.")
    for path in {*(ROOT / "tiered_mem").glob("*.py")} - {COMMAND}:
        assert not {name for name in imports(tree_of(path)) if name.startswith(above)}


def test_every_file_of_tiered_mem_has_its_place() -> None:
    files = {path.stem for path in (ROOT / "tiered_mem").glob("*.py")} - {COMMAND.stem}
    assert {*files, *PACKAGES} == {name for row in ORDER for name in row}, "give a new file its row in ORDER"


def test_product_code_imports_its_dependencies_only() -> None:
    for path in PRODUCT:
        foreign = {top(name) for name in imports(tree_of(path)) if not name.startswith(".")}
        foreign -= sys.stdlib_module_names | DEPENDENCIES
        foreign -= FOR_PEOPLE.get(path.parent.name, set()) | FOR_PEOPLE.get(path.stem, set())
        # axolotl takes what a plugin adds to its configuration as a class of pydantic's.
        foreign -= {path.stem, "pydantic"} if path.parent.name == "integrations" else set()
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


def test_only_device_names_torch_npu() -> None:
    naming = [str(path.relative_to(ROOT)) for path in PRODUCT if names(tree_of(path), "torch_npu")]
    assert naming == ["tiered_mem/device/device.py", "tiered_mem/versions.py"]  # which reads its version


def test_the_product_does_not_know_of_the_emulator() -> None:
    """But for the one command that starts it, in a process of its own."""
    knowing = [path for path in PRODUCT if names(tree_of(path), "ascend_emulator")]
    assert knowing == [ROOT / "tiered_mem" / "cli" / "plan.py"]


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_assert_and_no_print(path: Path) -> None:
    tree = tree_of(path)
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert "print" not in calls(tree)


def test_importing_brings_in_the_dependencies_only() -> None:
    """torch brings in much of its own accord, so what counts is what comes on top of the dependencies."""
    code = (
        "import json, sys, torch, numpy, psutil, safetensors.torch, xxhash; before = set(sys.modules);"
        "from tiered_mem import TieringManager;"
        "print(json.dumps([sorted(before), sorted(set(sys.modules) - before)]))"
    )
    done = run("-c", code, cwd=ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    before, added = (set(modules) for modules in json.loads(done.stdout))
    assert "tiered_mem.manager" in added
    assert {top(name) for name in added} - sys.stdlib_module_names <= {"tiered_mem", *DEPENDENCIES}
    strangers = {"torch_npu", "rich", "matplotlib", "prometheus_client", "hypothesis", "ascend_emulator"}
    assert not {top(name) for name in before | added} & strangers
