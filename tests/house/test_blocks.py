"""Each fenced block of the documents is what it says: programs run, commands are there, data parses."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from emulator.tests.launch import EMULATOR, run, run_ranks
from tests.conftest import RACES
from tests.house import commands
from tests.house.blocks import BLOCKS, PAGES, ROOT, Block
from tests.house.reader import ABSENT, absent_in, imported, place_of, programs_of
from tests.house.test_layers import tree_of

pytestmark = pytest.mark.once(why="its processes have a schedule of their own")

slowly = pytest.mark.slow(why="a process on the emulated NPU for each page")
# cpp: the emulator's own, of which each is a line of its sources. text: output, or a sketch.
LANGUAGES = {"cpp", "diff", "json", "python", "sh", "text", "toml", "yaml"}


def programs_for(place: str) -> list[Block]:
    return [program for page in PAGES for program in programs_of(page) if place_of(program) == place]


def pages_with(place: str) -> list[str]:
    return sorted({str(program.page) for program in programs_for(place)})


def of(*languages: str) -> pytest.MarkDecorator:
    """Blocks and results of diffs."""
    chosen = [block.result for block in BLOCKS if block.result.language in languages]
    return pytest.mark.parametrize("block", chosen, ids=str)


def test_there_are_many() -> None:
    assert {language for block in BLOCKS for language in (block.language, block.result.language)} == LANGUAGES
    assert len(BLOCKS) > 100


@pytest.fixture(scope="module")
def on_a_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the results are of all programs that need no device."""
    results = tmp_path_factory.mktemp("results")
    arguments = ["-m", "tests.house.reader", str(results), "cpu", *pages_with("cpu")]
    done = run(*arguments, cwd=ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD="0", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return results


@pytest.mark.parametrize("page", pages_with("cpu"))
def test_programs_run_on_a_cpu(on_a_cpu: Path, page: str) -> None:
    assert_all_ran(on_a_cpu, page)


@slowly
@pytest.mark.skipif(
    RACES, reason="examples for people are short of work; tests of each part have the detector look"
)
@pytest.mark.parametrize("page", pages_with("emulator"))
def test_programs_run_on_the_emulated_npu(page: str, tmp_path: Path) -> None:
    """With a clock, for those that ask for modelled time."""
    options = ["--clock", "h100"] if "clock" in page else []
    done = run(*EMULATOR, *options, "-m", "tests.house.reader", str(tmp_path), "emulator", page, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_all_ran(tmp_path, page)


@slowly
@pytest.mark.skipif(RACES, reason="tests/modelled has the detector look at two ranks")
@pytest.mark.parametrize("program", programs_for("ranks"), ids=str)
def test_programs_run_on_two_ranks(program: Block, tmp_path: Path) -> None:
    """Each in a job of its own, as a store of torchrun's has one process group."""
    done = run_ranks(2, (), "-m", "tests.house.reader", str(tmp_path), "ranks", str(program), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert_all_ran(tmp_path, str(program), rank)


def assert_all_ran(results: Path, page: str, rank: int = 0) -> None:
    errors = json.loads((results / f"{page.replace('/', '-')}.{rank}.json").read_text())
    assert errors == {}, "\n".join(f"{page}:{line}\n{error}" for line, error in errors.items())


@pytest.mark.parametrize(
    "program",
    programs_for("nowhere"),
    ids=lambda each: f"{each} ({'; '.join(f'{name}: {ABSENT[name]}' for name in absent_in(each))})",
)
def test_programs_for_absent_frameworks_import_what_there_is(program: Block) -> None:
    """They were compiled for this. The names of tiered_mem are looked up, an integration's in its source."""
    for node in ast.walk(ast.parse(program.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tiered_mem"):
            for alias in node.names:
                assert alias.name in names_of(str(node.module)), f"{node.module} has no {alias.name}"
    assert not [name for name in imported(program.text) if name.startswith("tiered_mem") and not names_of(name)]


def names_of(module: str) -> set[str]:
    """What can be imported from a module, without importing an integration, whose framework is not there."""
    if not module.startswith("tiered_mem.integrations."):
        return set(dir(importlib.import_module(module)))
    tree = tree_of(ROOT / f"{module.replace('.', '/')}.py")
    assigned = {target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets}
    return {getattr(each, "name", "") or getattr(each, "id", "") for each in {*tree.body, *assigned}} - {""}


@of("sh")
def test_commands_are_there(block: Block) -> None:
    commands.check(block.text)


@of("text")
def test_commands_before_their_output_are_there(block: Block) -> None:
    for line in block.text.splitlines():
        if line.startswith("$ "):
            commands.check(line.removeprefix("$ "))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=str)
def test_commands_in_sentences_are_there(page: Path) -> None:
    for command in re.findall(
        r"`((?:make [a-z]|python (?:-m (?:asc|tests|bench)|examples))[^`\[(]+)`", text_of(page)
    ):
        commands.check(" ".join(command.split()))


def text_of(page: Path) -> str:
    """Without its blocks."""
    return re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


@of("json")
def test_json_parses(block: Block) -> None:
    assert isinstance(json.loads(block.text), dict)


@of("toml")
def test_toml_parses(block: Block) -> None:
    assert tomllib.loads(block.text)


@of("yaml")
def test_yaml_parses(block: Block) -> None:
    yaml = pytest.importorskip("yaml", reason="make setup installs it")
    assert isinstance(yaml.safe_load(block.text), dict)
