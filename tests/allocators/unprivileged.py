"""Code in a process that may lock next to nothing in RAM."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

from emulator.tests.launch import run

MAY_LOCK = 64 << 10
_GIVE_UP = f"""
import os, resource
from tiered_mem import allocators
from tiered_mem.allocators.runtime import RegisteredMemory
from tests.allocators.mappings import mapped_bytes, resident_pages
resource.setrlimit(resource.RLIMIT_MEMLOCK, ({MAY_LOCK}, {MAY_LOCK}))
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
"""


def output_of(code: str) -> str:
    """What code prints, and logs, that may use `allocators`, RegisteredMemory and mappings.py, and lock nothing."""
    done = run("-c", _GIVE_UP + dedent(code), cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
