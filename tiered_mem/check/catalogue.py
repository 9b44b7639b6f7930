"""All checks, in the order in which they are run: what others rest on comes first."""

from __future__ import annotations

from .copies import copies
from .drive import drive
from .equality import equality
from .failure import failure
from .memory import memory
from .order import order
from .outcome import Check
from .pinned import pinned


def catalogue() -> dict[str, list[Check]]:
    """By subject."""
    return {
        "host memory": pinned(),
        "copies": copies(),
        "order": order(),
        "device memory": memory(),
        "drive": drive(),
        "training": equality(),
        "failure": failure(),
    }
