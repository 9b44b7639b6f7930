"""tiered_mem on the emulator with options of its own; with a real device under test these are left out."""

from tests.conftest import EMULATED

if not EMULATED:
    collect_ignore_glob = ["test_*.py"]
