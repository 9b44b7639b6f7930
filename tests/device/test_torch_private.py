"""torch's private names: one file has them, and a torch that lacks one is refused with its name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulator.tests.launch import run
from tests.house.test_layers import PRODUCT, ROOT, tree_of
from tiered_mem.device.torch_private import OPTIMIZER_HOOKS, SUPPORTED

pytestmark = pytest.mark.once(why="it needs no device")
of_another_process = pytest.mark.slow(why="a process imports torch")

FILE = ROOT / "tiered_mem" / "device" / "torch_private.py"
# Used by these names elsewhere too. FILE looks whether torch has them.
OF_TORCH = {
    *("_base", "_buffers", "_foreach_copy_", "_indices", "_modules", "_parameters", "_version"),
    *OPTIMIZER_HOOKS,
}
# Of the standard library, and of a framework whose class an integration derives from.
OF_OTHERS = {"_exit", "_getframe", "_name", "_replace", "_build_model_optimizer"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.Module) -> Iterator[str]:
    """The private names that a file defines: functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def private_names(tree: ast.Module) -> Iterator[str]:
    """The private names that a file uses of others' objects and modules, written as such or in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("torch."):
            yield from node.value.split(".")


OWN = {name for path in PRODUCT if path != FILE for name in own_names(tree_of(path))}


@pytest.mark.parametrize("path", [p for p in PRODUCT if p != FILE], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_other_file_uses_a_private_name(path: Path) -> None:
    used = {name for name in private_names(tree_of(path)) if is_private(name)}
    strange = used - OWN - OF_TORCH - OF_OTHERS - ({"_signal", "_thread"} if path.stem == "interrupts" else set())
    assert not strange, f"move it to {FILE.name}, or to OF_TORCH and have {FILE.name} look for it"


def test_the_file_looks_for_what_others_use() -> None:
    text = FILE.read_text()
    assert all(f'"{name}"' in text for name in OF_TORCH)


@pytest.mark.parametrize(
    "gone",
    [
        "torch._C._current_graph_task_id",
        pytest.param("torch._C._autograd._push_saved_tensors_default_hooks", marks=of_another_process),
        pytest.param("torch.fx._symbolic_trace._is_fx_tracing_flag", marks=of_another_process),
        pytest.param("torch.autograd.Variable._execution_engine.queue_callback", marks=of_another_process),
        pytest.param("torch.utils.checkpoint._recomputation_hook", marks=of_another_process),
        pytest.param("torch.nn.Module._call_impl", marks=of_another_process),
    ],
)
def test_a_torch_that_lacks_one_is_refused(gone: str) -> None:
    holder = gone.removesuffix(".queue_callback")  # which nobody can take out by itself
    code = f"import torch, torch.fx; del {holder}; import tiered_mem; tiered_mem.TieringManager"
    failed = run("-c", code, cwd=ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    last = failed.stderr.strip().splitlines()[-1]
    assert re.fullmatch(
        rf"ImportError: torch 2\.\d+\S* has no {re.escape(gone)}, which tiered_mem needs: "
        rf"install a torch that is {re.escape(SUPPORTED)}",
        last,
    )


@of_another_process
@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.8.0+cu126", "ImportError: torch 2.8.0+cu126 is too old for tiered_mem: pip install 'torch>=2.9'\n"),
        ("2.9.0", ""),
        ("2.15.2", ""),
        ("2.16.0a0", "torch 2.16.0a0 is newer than any that tiered_mem was tried with"),
        ("3.0.0", "torch 3.0.0 is newer than any that tiered_mem was tried with"),
    ],
)
def test_a_version_that_was_not_tried_is_told(version: str, said: str) -> None:
    code = f"import torch; torch.__version__ = torch.torch_version.TorchVersion({version!r})"
    code += "; import tiered_mem; tiered_mem.TieringManager"
    done = run("-c", code, cwd=ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert said in done.stderr if said else done.stderr == ""
    assert (done.returncode == 0) is ("ImportError" not in said)


@of_another_process
def test_a_hook_dictionary_that_is_missing_is_found() -> None:
    code = (
        "import torch; kept = torch.nn.Module.__init__\n"
        "def init(self):\n    kept(self); del self._forward_pre_hooks_with_kwargs\n"
        "torch.nn.Module.__init__ = init; import tiered_mem.device.torch_private"
    )
    failed = run("-c", code, cwd=ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "has no torch.nn.Module._forward_pre_hooks_with_kwargs, which" in failed.stderr


@of_another_process
def test_what_one_device_has_is_looked_for_when_it_is_asked_for() -> None:
    """Without torch_npu there is no such name, and nobody minds until then."""
    code = "from tiered_mem.device.torch_private import npu_format; npu_format()"
    failed = run("-c", code, cwd=ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "has no torch.ops.npu.get_npu_format.default._op, of torch_npu, which" in failed.stderr


def test_the_supported_versions_are_those_that_are_declared() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f"torch>={SUPPORTED.split()[0]}" in project
    assert "2.13" in SUPPORTED
