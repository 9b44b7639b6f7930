"""The libraries of the emulated CANN: where they are, and how a package that was installed compiles them.

They are compiled against one torch and one torch_npu. In a checkout make puts them into `lib` beside this file.
An installed package carries their sources, and compiles them once for each pair of versions into a folder of the
user, which the variable ASCEND_EMULATOR_CACHE may name.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ascend_emulator.errors import EmulatorError

CACHE = "ASCEND_EMULATOR_CACHE"
_PACKAGE = Path(__file__).parent
_SOURCES = _PACKAGE / "sources"
_LAST_LINES = 15


@functools.cache
def folder() -> Path:
    """Where the libraries for this Python's torch and torch_npu are, or will be."""
    return _of_the_user() if _SOURCES.is_dir() else _PACKAGE / "lib"


def runtime_library() -> Path:
    return folder() / "libascendcl.so"


def libraries_of_the_runtime() -> list[Path]:
    """What torch_npu asks for by its name, in the order in which they are to be loaded."""
    others = "hccl", "hcomm", "ge_runner", "graph", "acl_tdt_channel", "acl_op_compiler", "mspti", "ascend_hal"
    return [runtime_library(), *(folder() / f"lib{name}.so" for name in others)]


def kernels_library() -> Path:
    return folder() / "libopapi.so"


def watch_library() -> Path:
    return folder() / "libwatch.so"


def compile_missing() -> None:
    """Compiles the libraries where an installed package has not done so yet. Another process may be at it.

    Raises EmulatorError where that fails, with the compiler's last words, and in a checkout where make was not run.
    """
    target = folder()
    if not _SOURCES.is_dir():
        for path in (*libraries_of_the_runtime(), kernels_library(), watch_library()):
            if not path.exists():
                raise EmulatorError(f"{path} is not built; run `make -C {_PACKAGE.parent}`")
    elif not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{target}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # goes with the process, however that ends
            if not target.is_dir():
                _compile(target)


def _of_the_user() -> Path:
    """A folder for these versions and these sources, so that several of them can be there."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _SOURCES.rglob("*") if path.is_file()):
        digest.update(path.relative_to(_SOURCES).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = os.environ.get(CACHE) or Path(cache, "ascend_emulator")
    return Path(home, f"torch-{_version('torch')}-torch_npu-{_version('torch_npu')}-{digest.hexdigest()[:12]}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _compile(target: Path) -> None:
    versions = f"torch {_version('torch')} and torch_npu {_version('torch_npu')}"
    for tool in ("make", os.environ.get("CXX", "g++")):
        if shutil.which(tool) is None:
            raise EmulatorError(
                f"the emulator has to be compiled once for {versions}, and {tool} is not installed "
                "(Debian: apt install make g++)"
            )
    print(
        f"ascend_emulator: compiling for {versions}, once, which takes some minutes; into {target}",
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as work:
        shutil.copytree(_SOURCES, work, dirs_exist_ok=True)
        jobs = len(os.sched_getaffinity(0))
        command = ["make", f"--jobs={jobs}", "LIB=lib", f"PYTHON={sys.executable}"]
        environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
        done = subprocess.run(
            command, cwd=work, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            said = "\n".join(done.stdout.splitlines()[-_LAST_LINES:])
            raise EmulatorError(f"the emulator could not be compiled; `{' '.join(command)}` ended with\n{said}")
        os.rename(Path(work, "lib"), target)
