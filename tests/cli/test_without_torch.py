"""The command line, and `import tiered_mem`, where torch is not wanted or does not load."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

import tiered_mem
from emulator.tests.launch import run
from tests.pictures.sample import write
from tests.spill.folders import leave_dead
from tests.spill.without_torch import ROOT
from tiered_mem import errors

COMMAND = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torch_npu"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refuse())
from tiered_mem.cli import main
sys.exit(main(sys.argv[1:]))
"""
STEP = """
import os, torch
before = dict(os.environ)
from tiered_mem import TieringManager
layer = torch.nn.Linear(4, 4)
with TieringManager(policy="layer-order", device="cpu", host_bytes="1MiB") as manager:
    with manager.offload_context([layer], min_bytes=1):
        loss = layer(torch.ones(2, 4)).sum()
    loss.backward()
print(layer.weight.grad.sum().item(), dict(os.environ) == before)
"""
WITHOUT = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
ONLY = ("--bytes", "10KB")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["probe", "--help"],
        ["probe", "DIR", "--device", "cpu", *ONLY],
        ["inspect", "DIR"],
        ["clean", "DIR"],
        ["plot", "DIR/trace.json"],
        ["report", "DIR/trace.json"],
    ],
)
def test_what_needs_no_torch_imports_none(tmp_path: Path, arguments: list[str]) -> None:
    leave_dead(tmp_path)
    write(tmp_path / "trace.json")
    done = run("-c", COMMAND, *(word.replace("DIR", str(tmp_path)) for word in arguments), cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("json", [[], ["--json"]])
def test_without_rich_it_says_what_to_install(tmp_path: Path, json: list[str]) -> None:
    without = "import sys; sys.modules['rich'] = None"
    version, looked = (
        run("-c", without + COMMAND, *arguments, cwd=ROOT)
        for arguments in (["--version"], ["inspect", str(tmp_path), *json])
    )
    assert (version.returncode, version.stderr) == (0, "")
    assert looked.returncode == 2
    assert looked.stderr == (
        "tiered-mem: what it finds is shown by the package rich: pip install 'tiered_mem[cli]'\n"
    )


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder with an installed backend for torch that does not load: put it on the path."""
    folder = tmp_path / "site"
    (folder / "broken_backend-1.0.dist-info").mkdir(parents=True)
    (folder / "broken_backend.py").write_text("raise ImportError('libbroken.so: cannot open it')\n")
    about = folder / "broken_backend-1.0.dist-info"
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken_backend\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nbroken = broken_backend:load\n")
    return folder


@pytest.mark.slow(why="a process imports torch")
def test_a_backend_that_does_not_load_is_one_line(broken: Path) -> None:
    done = run("-c", "import tiered_mem\nfrom tiered_mem import TieringManager", cwd=ROOT, pythonpath=broken)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        "tiered_mem.errors.DeviceUnavailable: torch does not load: Failed to load the backend extension: broken "
        "(libbroken.so: cannot open it). Repair that package, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the "
        "environment to go without it"
    )
    assert done.stderr.count("Traceback") == 1


@pytest.mark.slow(why="a process imports torch")
def test_the_cpu_needs_no_backend(broken: Path) -> None:
    done = run("-c", STEP, cwd=ROOT, pythonpath=broken, **WITHOUT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "32.0 True\n", "")


@pytest.mark.slow(why="three processes import torch")
def test_a_probe_tells_of_a_backend_that_does_not_load_and_measures_the_rest(broken: Path, tmp_path: Path) -> None:
    command = ("-m", "tiered_mem", "probe", str(tmp_path), *ONLY)
    done = run(*command, cwd=ROOT, pythonpath=broken)
    assert done.returncode == 1
    told = [line for line in done.stdout.splitlines() if "libbroken.so" in line]
    assert told == [
        "torch's backend broken does not load: libbroken.so: cannot open it. So `import torch` fails here, unless "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set"
    ]
    assert "checksum" in done.stdout
    found = json.loads(run(*command, "--json", cwd=ROOT, pythonpath=broken).stdout)
    assert found["broken_backends"]["broken"] == "libbroken.so: cannot open it"
    assert found["drive"]["write"] > 0
    found = json.loads(run(*command, "--json", cwd=ROOT, pythonpath=broken, **WITHOUT).stdout)
    assert found["broken_backends"] == {}


@pytest.mark.slow(why="two processes import torch")
def test_torch_npu_without_its_libraries_is_one_line() -> None:
    """As on every machine where torch_npu is installed and CANN is not."""
    try:
        distribution("torch_npu")
    except PackageNotFoundError:
        pytest.skip("torch_npu is not installed here")
    if run("-c", "import torch_npu", cwd=ROOT, **WITHOUT).returncode == 0:
        pytest.skip("torch_npu loads here")
    done = run("-c", "from tiered_mem import TieringManager", cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("tiered_mem.errors.DeviceUnavailable: torch does not load: ")
    assert done.stderr.count("Traceback") == 1


def test_all_that_is_exported_is_there() -> None:
    """Every error among it: a user can catch one without knowing its file."""
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    exported = {"OffloadContext", "TieringManager", "async_save_on_cpu", *kinds}
    exported |= {"BudgetTooSmall", "OutOfHostMemory"}  # a policy's, and an allocator's
    assert {"TierFull", "InterruptedStep"} < kinds
    assert set(tiered_mem.__all__) == {*exported, "configure", "default_manager", "optim"}
    assert set(tiered_mem.__all__) <= set(dir(tiered_mem))
    assert all(getattr(tiered_mem, name).__name__ == name for name in exported)
    assert tiered_mem.policies.LayerOrderPolicy.__name__ == "LayerOrderPolicy"
    with pytest.raises(ImportError, match="nothing_like_it"):
        from tiered_mem import nothing_like_it  # noqa: F401
