"""All checks, in the order in which they are run: what others rest on comes first."""

from __future__ import annotations

from .copies import copies
from .drive import drive
from .equality import equality
from .events import events
from .failure import failure
from .memory import memory
from .order import order
from .outcome import Check
from .overlap import overlap
from .pinned import pinned


def catalogue() -> dict[str, list[Check]]:
    """By subject."""
    return {
        "host memory": pinned(),
        "events": events(),
        "copies": copies(),
        "order": order(),
        "overlap": overlap(),
        "device memory": memory(),
        "drive": drive(),
        "training": equality(),
        "failure": failure(),
    }
