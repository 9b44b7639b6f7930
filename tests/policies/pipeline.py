"""A pipeline of eight microbatches, and a schedule of entries for it."""

from __future__ import annotations

Entries = dict[int, tuple[bool, int, bool, int]]

PIPELINE = ["F0", "F1", "F2", "F3", "B0", "F4", "B1", "F5", "B2", "F6", "B3", "F7", "B4", "B5", "B6", "B7"]
PIPELINE_ENTRIES: Entries = {
    1: (False, 0, True, 4),
    2: (False, 0, True, 5),
    3: (True, 4, True, 6),
    4: (True, 5, True, 7),
    5: (True, 6, False, 4),
    6: (True, 7, False, 5),
}
