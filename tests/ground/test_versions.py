from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

import tiered_mem
from tiered_mem.versions import versions

pytestmark = pytest.mark.once(why="it needs no device")

# As CANN's installers write them.
TOOLKIT = """package_name=Ascend-cann-toolkit
version=8.3.RC1
innerversion=V100R001C23SPC001B235
compatible_version=[V100R001C15],[V100R001C18]
arch=aarch64
os=linux
"""
CFG = """# version: 1.0
runtime_running_version=[7.7.0.1.238:8.0.RC3]
toolkit_running_version=[7.7.0.1.238:8.0.RC3]
toolkit_installed_version=[7.7.0.1.238:8.0.RC3]
"""
DRIVER = "Version=25.2.0\nascendhal_version=7.35.23\naicpu_version=1.0\n"
NVIDIA = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)
GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)
"""
OLDER_NVIDIA = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing on it but Python's packages."""
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_packages_are_as_they_are_installed(root: Path) -> None:
    found = versions(root)
    assert found["tiered_mem"] == tiered_mem.__version__
    assert found["torch"] == version("torch")
    assert {found[name] for name in ("cann", "ascend_driver", "nvidia_driver")} == {None}


@pytest.mark.parametrize(
    ("place", "text", "told"),
    [
        ("aarch64-linux/ascend_toolkit_install.info", TOOLKIT, "8.3.RC1"),
        ("ascend_toolkit_install.info", TOOLKIT, "8.3.RC1"),
        ("x86_64-linux/ascend_other_install.info", "version=9.0.0\n", "9.0.0"),
        ("version.cfg", CFG, "8.0.RC3"),
        ("version.cfg", "nothing that is known\n", None),
    ],
)
@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"])
def test_cann_is_the_one_that_the_environment_names(
    root: Path, monkeypatch: pytest.MonkeyPatch, variable: str, place: str, text: str, told: str | None
) -> None:
    write(root / "cann" / place, text)
    assert versions(root)["cann"] is None
    monkeypatch.setenv(variable, str(root / "cann"))
    assert versions(root)["cann"] == told


def test_the_toolkit_says_it_before_other_packages(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root / "aarch64-linux" / "ascend_nnal_install.info", "version=8.1.0\n")
    write(root / "aarch64-linux" / "ascend_toolkit_install.info", TOOLKIT)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(root))
    assert versions(root)["cann"] == "8.3.RC1"


def test_the_driver_of_ascend(root: Path) -> None:
    write(root / "usr/local/Ascend/driver/version.info", DRIVER)
    assert versions(root)["ascend_driver"] == "25.2.0"
    write(root / "opt/hw/driver/version.info", "Version=24.1.rc2\n")
    write(root / "etc/ascend_install.info", "UserName=HwHiAiUser\nDriver_Install_Path_Param=/opt/hw\n")
    assert versions(root)["ascend_driver"] == "24.1.rc2"


@pytest.mark.parametrize(("text", "told"), [(NVIDIA, "580.95.05"), (OLDER_NVIDIA, "535.183.01"), ("?", None)])
def test_the_driver_of_nvidia(root: Path, text: str, told: str | None) -> None:
    write(root / "proc/driver/nvidia/version", text)
    assert versions(root)["nvidia_driver"] == told
