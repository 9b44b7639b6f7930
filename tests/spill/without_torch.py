"""Makes tiered_mem.spill importable without tiered_mem, which takes torch along, and two seconds each time."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]

if "tiered_mem" not in sys.modules:
    package = ModuleType("tiered_mem")
    package.__path__ = [str(ROOT / "tiered_mem")]
    sys.modules["tiered_mem"] = package
