"""Functions that run in forks of this process, a few at a time."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def in_forks(calls: Iterable[tuple[T, Callable[[], int]]], jobs: int) -> Iterator[tuple[T, int]]:
    """Each with the exit code that its function returns, or minus the signal that ended it, as they end.

    jobs: how many run at a time. The next call is asked for when there is room for it.
    """
    calls = iter(calls)
    running: dict[int, T] = {}
    while True:
        for each, call in islice(calls, jobs - len(running)):
            running[_fork(call)] = each
        if not running:
            return
        process, status = os.wait()
        yield running.pop(process), os.waitstatus_to_exitcode(status)


def _fork(call: Callable[[], int]) -> int:
    """The new process, which ends with the call: what this one has yet to do is not done twice."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        code = call()
    except BaseException:  # as an interrupt that comes out of pytest
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
