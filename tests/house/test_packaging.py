"""tiered_mem.allocators and tiered_mem.policies import from a wheel and from a plain checkout."""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import tiered_mem

pytestmark = pytest.mark.once(why="it needs no device")

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "tiered_mem",
    "tiered_mem.activations",
    "tiered_mem.allocators",
    "tiered_mem.check",
    "tiered_mem.cli",
    "tiered_mem.cpu_offload",
    "tiered_mem.device",
    "tiered_mem.ground",
    "tiered_mem.integrations",
    "tiered_mem.optimizer",
    "tiered_mem.phases",
    "tiered_mem.pictures",
    "tiered_mem.policies",
    "tiered_mem.policies.planning",
    "tiered_mem.spill",
    "tiered_mem.tiers",
    "tiered_mem.trace",
)
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # setuptools writes its own sys.argv
build_meta.build_sdist(out)
build_meta.build_wheel(out)
"""
IMPORT = """
import importlib, json, sys
sys.path[:0] = [sys.argv[1]]
sys.path += sys.argv[2:]
print(json.dumps([importlib.import_module(name).__file__ for name in {packages!r}]))
"""


def build(source: Path, out: Path) -> tuple[Path, Path]:
    """The sdist and the wheel that setuptools makes of a source tree, without a network."""
    subprocess.run([sys.executable, "-c", BUILD, out], cwd=source, check=True, capture_output=True)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def imported_from(folder: Path) -> list[str]:
    """The files that the packages are imported from with `folder` on the path and nothing installed.

    Without the site module no .pth file is read, so that an editable install does not count.
    """
    libraries = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", IMPORT.format(packages=PACKAGES), folder, *libraries],
        cwd=folder.parent,
        env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        check=True,
        capture_output=True,
        text=True,
    )
    return [str(Path(file).relative_to(folder)) for file in json.loads(done.stdout)]


def copy_checkout(to: Path) -> Path:
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info")
    return shutil.copytree(ROOT, to, symlinks=True, ignore=unwanted)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel of a copy of this checkout."""
    work = tmp_path_factory.mktemp("build")
    return build(copy_checkout(work / "checkout"), work / "dist")


def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_the_packages_and_no_more(built: tuple[Path, Path]) -> None:
    sources = {
        f"{package.replace('.', '/')}/{path.name}"
        for package in PACKAGES
        for path in (ROOT / package.replace(".", "/")).glob("*.py")
    }
    assert {f"{package.replace('.', '/')}/__init__.py" for package in PACKAGES} < sources
    assert wheel_files(built[1]) == sources | {"tiered_mem/py.typed", "tiered_mem/pictures/page.html"}


def test_the_wheel_installs_the_command_line(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
        assert archive.read(name).decode().split("\n")[:2] == [
            "[console_scripts]",
            "tiered-mem = tiered_mem.cli:main",
        ]


def test_the_version_is_the_one_that_the_package_tells(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Version"] == tiered_mem.__version__


def test_the_sdist_is_the_whole_repository(built: tuple[Path, Path]) -> None:
    """But for what git ignores, and hidden files, of which the copy that it was built of has none."""
    sdist = built[0]
    with tarfile.open(sdist) as archive:
        top = sdist.name.removesuffix(".tar.gz")
        found = {str(Path(each.name).relative_to(top)) for each in archive.getmembers() if each.isfile()}
    checkout = sdist.parents[1] / "checkout"
    files = {str(path.relative_to(checkout)) for path in checkout.rglob("*") if path.is_file()}
    built_here = ("emulator/ascend_emulator/lib/", "build/", "emulator/build/", "tiered_mem.egg-info/")
    left_out = {
        name for name in files - found if not name.startswith(built_here) and not name.endswith("-small.json")
    }
    assert not left_out
    assert {
        "tests/conftest.py",
        "emulator/runtime/copy.cpp",
        "docs/design.md",
        "tiered_mem/policies/lru.py",
    } <= found
    assert not [name for name in found if name.startswith(built_here[:-1]) or name.endswith((".pyc", ".so"))]


def test_the_metadata_says_what_the_files_say(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        about = email.message_from_bytes(archive.read(name))
    needed = {line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert needed == {"torch>=2.9", "numpy", "psutil", "safetensors", "xxhash"}
    assert {"cli", "npu", "plot", "metrics"} <= set(about.get_all("Provides-Extra", []))
    assert f"\nversion: {about['Version']}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {about['Version']}\n" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow(why="it builds a second wheel")
def test_a_wheel_made_of_the_sdist_is_the_same(built: tuple[Path, Path], tmp_path: Path) -> None:
    sdist, wheel = built
    shutil.unpack_archive(sdist, tmp_path, filter="data")
    _, again = build(tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path / "dist")
    assert wheel_files(again) == wheel_files(wheel)


@pytest.mark.slow(why="it builds a second wheel")
def test_an_editable_install_is_a_plain_path(tmp_path: Path) -> None:
    """Type checkers follow a path. They do not run the import hook that setuptools makes of other layouts."""
    checkout = copy_checkout(tmp_path / "checkout")
    command = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    (tmp_path / "dist").mkdir()
    subprocess.run(
        [sys.executable, "-c", command, tmp_path / "dist"], cwd=checkout, check=True, capture_output=True
    )
    wheel = next((tmp_path / "dist").glob("*.whl"))
    assert {Path(name).suffix for name in wheel_files(wheel)} == {".pth"}
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(next(iter(wheel_files(wheel)))).decode().strip() == str(checkout)


@pytest.mark.slow(why="a process imports torch")
def test_the_packages_import_from_the_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.unpack_archive(built[1], tmp_path / "site", format="zip")
    assert imported_from(tmp_path / "site") == [f"{package.replace('.', '/')}/__init__.py" for package in PACKAGES]


@pytest.mark.slow(why="a process imports torch")
def test_the_packages_import_from_a_checkout() -> None:
    assert imported_from(ROOT) == [f"{package.replace('.', '/')}/__init__.py" for package in PACKAGES]
