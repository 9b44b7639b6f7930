"""The versions of all that a training here depends on, read without importing torch."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__version__ = "0.2.0"

_CANN_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_NVIDIA = re.compile(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s")


def versions(root: Path = Path("/")) -> dict[str, str | None]:
    """The versions of tiered_mem, Python, torch, torch_npu, CANN, and the drivers.

    Args:
        root: Where the files of drivers are looked for.

    Returns:
        By the names "tiered_mem", "python", "torch", "torch_npu", "cann", "ascend_driver" and "nvidia_driver". None
        for each that is not installed, or of which no file says the version. CANN is the one that
        ASCEND_HOME_PATH names, which its set_env.sh does.
    """
    return {
        "tiered_mem": __version__,
        "python": platform.python_version(),
        "torch": _package("torch"),
        "torch_npu": _package("torch_npu"),
        "cann": _cann(),
        "ascend_driver": _ascend_driver(root),
        "nvidia_driver": _first(_NVIDIA, root / "proc" / "driver" / "nvidia" / "version"),
    }


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cann() -> str | None:
    home = next((Path(os.environ[name]) for name in _CANN_HOMES if os.environ.get(name)), None)
    if home is None:
        return None
    # One for each package that was installed, in a folder for each architecture. The toolkit's comes first.
    for pattern in ("ascend_toolkit_install.info", "ascend_*_install.info"):
        for path in sorted([*home.glob(pattern), *home.glob(f"*/{pattern}")]):
            if found := _value("version", path):
                return found
    # toolkit_installed_version=[7.6.0.1.220:8.0.0]: the package's own number, and CANN's.
    listed = _value("toolkit_installed_version", home / "version.cfg")
    return listed.strip("[]").rpartition(":")[2] if listed else None


def _ascend_driver(root: Path) -> str | None:
    told = _value("Driver_Install_Path_Param", root / "etc" / "ascend_install.info")
    folders = [root / told.lstrip("/")] if told else []
    for folder in (*folders, root / "usr" / "local" / "Ascend"):
        if found := _value("Version", folder / "driver" / "version.info"):
            return found
    return None


def _value(name: str, path: Path) -> str | None:
    """Of a line `name=value`."""
    return _first(re.compile(rf"^{name}\s*=\s*(\S+)", re.MULTILINE), path)


def _first(pattern: re.Pattern[str], path: Path) -> str | None:
    try:
        found = pattern.search(path.read_text(errors="replace"))
    except OSError:  # it is not there, or not for this user to read
        return None
    return found[1] if found else None
