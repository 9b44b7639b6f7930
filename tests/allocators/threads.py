"""Threads that get in each other's way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def sum_over_threads(work: Callable[[int], int], count: int) -> int:
    """The sum of work(0) to work(count - 1), each on a thread of its own. They are interrupted all the time."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(count) as threads:
            return sum(threads.map(work, range(count)))
    finally:
        sys.setswitchinterval(interval)
