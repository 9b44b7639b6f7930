"""A package that was installed, and not checked out: it compiles its libraries once. And pytest --ascend."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import ascend_emulator
import pytest

from emulator.tests.launch import EMULATOR, plain_environment, run, write_script

pytestmark = pytest.mark.once(why="its processes have a schedule of their own")

PACKAGE = Path(ascend_emulator.__file__).parent
REPORT = """
    from pathlib import Path
    maps = Path("/proc/self/maps").read_text()
    print(next(line.split()[-1] for line in maps.splitlines() if line.endswith("/libascendcl.so")))
"""
# The compiler is tested by `make`. Here the libraries that there are will do.
LINKS = f"""
all:
\t@test -x $(PYTHON) && echo made >> made
\t@mkdir -p $(LIB) && cp -s {PACKAGE}/lib/*.so $(LIB)
\t@cat made >> $(MADE)
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The folder of a package that brings sources and no libraries."""
    copy = tmp_path / "site" / "ascend_emulator"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    (copy / "sources").mkdir()
    (copy / "sources" / "Makefile").write_text(LINKS)
    return copy


def of(installed: Path, cache: Path) -> dict[str, str]:
    return {"ASCEND_EMULATOR_CACHE": str(cache), "MADE": str(installed / "made")}


def test_the_first_start_compiles_and_says_so(installed: Path, tmp_path: Path) -> None:
    script, cache = write_script(tmp_path, REPORT), tmp_path / "cache"
    first = run(*EMULATOR, script, cwd=tmp_path, pythonpath=installed.parent, **of(installed, cache))
    assert first.stderr.startswith("ascend_emulator: compiling for torch 2."), first.stderr
    (folder,) = (each for each in cache.iterdir() if each.is_dir())
    assert first.stderr.endswith(f"; into {folder}\n")
    assert first.stdout == f"{PACKAGE}/lib/libascendcl.so\n", "which the one in that folder leads to"
    assert (folder / "libascendcl.so").exists()
    second = run(*EMULATOR, script, cwd=tmp_path, pythonpath=installed.parent, **of(installed, cache))
    assert (second.stdout, second.stderr) == (first.stdout, "")
    assert (installed / "made").read_text() == "made\n"


def test_other_sources_have_libraries_of_their_own(installed: Path, tmp_path: Path) -> None:
    script, cache = write_script(tmp_path, REPORT), tmp_path / "cache"
    run(*EMULATOR, script, cwd=tmp_path, pythonpath=installed.parent, **of(installed, cache))
    (installed / "sources" / "new.cpp").touch()
    done = run(*EMULATOR, script, cwd=tmp_path, pythonpath=installed.parent, **of(installed, cache))
    assert done.stderr.startswith("ascend_emulator: compiling for"), done.stderr
    assert len([each for each in cache.iterdir() if each.is_dir()]) == 2


def test_two_first_starts_at_once_compile_once(installed: Path, tmp_path: Path) -> None:
    script, cache = write_script(tmp_path, REPORT), tmp_path / "cache"
    environment = plain_environment(PYTHONPATH=str(installed.parent), **of(installed, cache))
    command = [sys.executable, *EMULATOR, script]
    both = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert all("libascendcl.so" in each.communicate()[0] for each in both)
    assert (installed / "made").read_text() == "made\n"


def test_what_the_compiler_says_is_told_and_nothing_is_left(installed: Path, tmp_path: Path) -> None:
    script, cache = write_script(tmp_path, REPORT), tmp_path / "cache"
    (installed / "sources" / "Makefile").write_text("all:\n\t@mkdir -p $(LIB); echo no such type; false\n")
    done = run(*EMULATOR, script, cwd=tmp_path, pythonpath=installed.parent, **of(installed, cache))
    assert (done.returncode, done.stdout) == (1, "")
    assert "ascend_emulator: the emulator could not be compiled; `make " in done.stderr
    assert "no such type" in done.stderr
    assert [each for each in cache.iterdir() if each.is_dir()] == []


def test_a_missing_compiler_is_told(installed: Path, tmp_path: Path) -> None:
    script, cache = write_script(tmp_path, REPORT), tmp_path / "cache"
    environment = of(installed, cache) | {"CXX": "no-such-compiler"}
    done = run(*EMULATOR, script, cwd=tmp_path, pythonpath=installed.parent, **environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no-such-compiler is not installed (Debian: apt install make g++)" in done.stderr


TESTS = """
    import torch

    def test_ones():
        assert torch.ones(2, device="npu").sum().item() == 2
"""


@pytest.mark.slow(why="a process imports torch")
def test_pytest_starts_the_device_where_it_is_asked_to(tmp_path: Path) -> None:
    write_script(tmp_path, TESTS)
    options = ("-m", "pytest", "-q", "-p", "ascend_emulator", "-p", "no:cacheprovider", "script.py")
    done = run(*options, "--ascend", cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    without = run(*options, cwd=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "1 failed" in without.stdout, without.stdout + without.stderr


def test_pytest_says_why_it_does_not_start_the_device(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("")
    options = ("-m", "pytest", "-p", "ascend_emulator", "-p", "no:cacheprovider", "--ascend")
    done = run(*options, cwd=tmp_path, ASCEND_EMULATOR_SCHEDULE="never")
    assert "ERROR: --ascend: ASCEND_EMULATOR_SCHEDULE in the environment: unknown schedule" in done.stderr
