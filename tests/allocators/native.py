"""Shared libraries that tests write for themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def library(folder: Path, name: str, source: str) -> str:
    """Compiles C++ source to a shared library of that name, and returns its path."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    (folder / "source.cpp").write_text(source)
    built = folder / name
    flags = ["-shared", "-fPIC", "-Wall", "-Werror", f"-Wl,-soname,{name}"]
    subprocess.run([compiler, *flags, folder / "source.cpp", "-o", built], check=True)
    return str(built)
