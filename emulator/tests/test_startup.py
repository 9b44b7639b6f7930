"""Where the emulator starts, and where it says why it does not."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

import ascend_emulator
import pytest
from ascend_emulator import EmulatorError
from ascend_emulator.options import parse_bytes, parse_rate

from emulator.tests.launch import EMULATOR, run, write_script

pytestmark = pytest.mark.once(why="its processes have a schedule of their own")

PACKAGE = Path(ascend_emulator.__file__).parent

# Prints whether the emulated runtime is there, without torch, which takes seconds to import.
REPORT = """
    from pathlib import Path
    maps = Path("/proc/self/maps").read_text()
    print("emulated" if "ascend_emulator/lib/libascendcl.so" in maps else "plain")
"""


@pytest.fixture
def fake_cann(tmp_path: Path) -> Path:
    """A CANN's folder, with an empty file for its library: loading that would fail."""
    folder = tmp_path / "cann"
    (folder / "lib64").mkdir(parents=True)
    (folder / "lib64" / "libascendcl.so").touch()
    return folder


def fake_torch_npu(folder: Path, version: str) -> None:
    """What pip would leave of a torch_npu of that version, as far as its version is asked for."""
    metadata = folder / f"torch_npu-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n")


def test_start_comes_before_torch() -> None:
    import_module("torch")
    with pytest.raises(EmulatorError, match=r"call ascend_emulator\.start\(\) before `import torch`"):
        ascend_emulator.start()


@pytest.mark.slow(why="each is a process that imports torch")
@pytest.mark.parametrize("first", ["torch", "torch_npu"])
def test_either_library_may_be_imported_first(tmp_path: Path, first: str) -> None:
    script = write_script(
        tmp_path,
        f"""
        import os
        import {first}
        import torch
        print((torch.ones(2, device="npu") + 1).tolist(), os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"])
        """,
    )
    done = run(*EMULATOR, script, cwd=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert done.stdout == "[2.0, 2.0] 1\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("hbm_bytes=0", "a size must be at least 1 byte, not 0"),
        ("hbm_bytes='much'", "'much' is not a size"),
        ("h2d_bytes_per_s=-1", "-1 is not a size"),
        ("stack='new'", "unknown stack 'new'"),
    ],
)
def test_bad_arguments_of_start(tmp_path: Path, arguments: str, message: str) -> None:
    code = f"import ascend_emulator; ascend_emulator.start({arguments})"
    done = run("-c", code, cwd=tmp_path)
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("variable", "below"), [("ASCEND_HOME_PATH", ""), ("ASCEND_TOOLKIT_HOME", ""), ("LD_LIBRARY_PATH", "lib64")]
)
def test_a_real_cann_is_not_replaced_unless_told_to(
    tmp_path: Path, fake_cann: Path, variable: str, below: str
) -> None:
    script = write_script(tmp_path, REPORT)
    environment = {variable: str(fake_cann / below)}
    refused = run(*EMULATOR, script, cwd=tmp_path, **environment)
    assert refused.returncode == 1
    assert refused.stderr.startswith(
        f"ascend_emulator: this machine has a real CANN ({fake_cann}/lib64/libascendcl.so)"
    )
    assert "--over-real-cann" in refused.stderr
    assert refused.stdout == ""
    assert run(*EMULATOR, "--over-real-cann", script, cwd=tmp_path, **environment).stdout == "emulated\n"


def test_a_real_npu_is_used_plainly_where_that_is_wished(tmp_path: Path, fake_cann: Path) -> None:
    (tmp_path / "torch.py").write_text("print('torch was imported')")
    script = write_script(tmp_path, REPORT + "    import os; print('TORCH_DEVICE_BACKEND_AUTOLOAD' in os.environ)")
    options = (*EMULATOR, "--unless-hardware", script)
    done = run(*options, cwd=tmp_path, pythonpath=tmp_path, ASCEND_HOME_PATH=str(fake_cann))
    assert (done.returncode, done.stdout) == (0, "plain\nFalse\n")  # torch loads the real torch_npu by itself
    assert done.stderr == "ascend_emulator: this machine has an accelerator, which is used as it is\n"


@pytest.mark.parametrize("version", ["9.9.9", "2.13.0rc1", "2.8.0"])
def test_an_unknown_torch_npu_is_refused(tmp_path: Path, version: str) -> None:
    fake_torch_npu(tmp_path, version)
    done = run(*EMULATOR, write_script(tmp_path, REPORT), cwd=tmp_path, pythonpath=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"torch_npu {version} is not a version that this emulator knows (2.9, " in done.stderr


@pytest.mark.parametrize("version", ["2.13.0+gitabc123", "2.11.0.post2", "2.9.0"])
def test_a_build_of_a_known_torch_npu_is_known(tmp_path: Path, version: str) -> None:
    fake_torch_npu(tmp_path, version)
    done = run(*EMULATOR, write_script(tmp_path, REPORT), cwd=tmp_path, pythonpath=tmp_path)
    assert done.stdout == "emulated\n", done.stderr


def test_races_need_an_allocator_that_tells(tmp_path: Path) -> None:
    fake_torch_npu(tmp_path, "2.11.0")
    script = write_script(tmp_path, REPORT)
    done = run(*EMULATOR, "--races", script, cwd=tmp_path, pythonpath=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the race detector needs an allocator that tells what it takes back" in done.stderr


def test_a_missing_torch_npu_is_told(tmp_path: Path) -> None:
    script = write_script(tmp_path, REPORT)
    done = run("-S", *EMULATOR, script, cwd=tmp_path, pythonpath=PACKAGE.parent)  # -S: no site-packages
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "ascend_emulator: torch_npu is not installed; pip install 'torch_npu==2.13.*'\n"


@pytest.mark.parametrize("missing", ["libascendcl.so", "libgraph.so", "libopapi.so", "libwatch.so"])
def test_libraries_that_are_not_built_are_told(tmp_path: Path, missing: str) -> None:
    copy = tmp_path / "ascend_emulator"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    (copy / "lib").mkdir()
    for library in (PACKAGE / "lib").iterdir():
        if library.name != missing:
            (copy / "lib" / library.name).symlink_to(library)
    done = run(*EMULATOR, write_script(tmp_path, REPORT), cwd=tmp_path, pythonpath=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"ascend_emulator: {copy}/lib/{missing} is not built; run `make -C {tmp_path}`\n"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("1B", 1),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("1.5GiB", 3 << 29),
        (".5 MB", 500_000),
        ("3TiB", 3 << 40),
    ],
)
def test_sizes(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes
    assert parse_rate(text) == nbytes
    assert parse_rate(f"{text}/s") == nbytes


@pytest.mark.parametrize("text", ["", "GB", "1 2", "-1", "1XB", "1gb", "1GB/s", "nan", "1e3"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(EmulatorError, match="is not a size"):
        parse_bytes(text)
