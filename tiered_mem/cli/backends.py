"""Imports torch also where one of the backends that are installed for it does not load."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import entry_points

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def import_torch() -> dict[str, str]:
    """Imports torch, and the installed backends after it. Returns the error of each that does not load, by name.

    `import torch` loads them too, fails as a whole where one of them fails, and cannot be tried again in the same
    process. No backend is loaded where torch is imported already, or where the environment forbids it. Raises
    ImportError where there is no torch.
    """
    if "torch" in sys.modules:
        return {}
    before = os.environ.get(_AUTOLOAD)
    os.environ[_AUTOLOAD] = "0"
    try:
        importlib.import_module("torch")
    finally:
        os.environ.pop(_AUTOLOAD)
        os.environ.update({} if before is None else {_AUTOLOAD: before})
    broken = {}
    if before in (None, "1"):
        for backend in entry_points(group="torch.backends"):
            try:
                backend.load()()
            except Exception as error:  # whatever a package that is not ours runs into, as torch has it
                broken[backend.name] = " ".join(str(error).split())
    return broken
