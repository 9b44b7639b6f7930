"""The host memory that this process takes: the request, checked against its share of the machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeAlias

from .host_limit import HostLimit
from .sizes import format_bytes, parse_bytes

HostBytes: TypeAlias = int | float | str | None
"""How much host memory a user asks for: bytes, a part of what there is, a size such as "64GiB", or "auto"."""

_LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"


def local_processes() -> int:
    """The number of training processes on this machine: LOCAL_WORLD_SIZE, which torchrun sets, or 1 without it.

    Raises ValueError where it is not a positive integer.
    """
    text = os.environ.get(_LOCAL_WORLD_SIZE, "1")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"{_LOCAL_WORLD_SIZE}={text!r} in the environment is not a positive integer: it says how many "
            "processes train on this machine. Set it to that number, or unset it for one"
        )
    return int(text)


def host_budget(asked: HostBytes, *, limits: Sequence[HostLimit], processes: int) -> int:
    """Bytes of host memory for this process, at least 1.

    A process's share of a limit is the limit divided by the processes. The smallest share counts.

    asked: None or "auto" is half of the share. A float above 0 and up to 1 is that part of it. An int, or a string
        such as "64GiB", is a number of bytes.
    limits: one or more. processes: how many share each limit that does not hold for each process by itself.

    Raises ValueError for more than the share, and for any other value.
    """
    if isinstance(asked, bool) or (isinstance(asked, float) and not 0 < asked <= 1):
        raise ValueError(
            f'host_bytes={asked!r} is not a size: give an int of bytes, a string such as "64GiB", a float above 0 '
            'and up to 1 for that part of what this process may use, or "auto" for half of it'
        )
    limit = min(limits, key=lambda limit: _share(limit, processes))
    share = _share(limit, processes)
    if asked is None or asked == "auto":
        nbytes = share // 2
    elif isinstance(asked, float):
        nbytes = int(Fraction(asked) * share)
    else:
        nbytes = parse_bytes(asked)
    if nbytes > share:
        raise ValueError(
            f"host_bytes={asked!r} is {format_bytes(nbytes)}, more than {_allowance(limit, processes)}. "
            f"This process can ask for at most {share} bytes ({format_bytes(share)})"
        )
    if nbytes < 1:
        raise ValueError(
            f"host_bytes={asked!r} is less than one byte of what {_allowance(limit, processes)}. "
            "Ask for more, or raise that limit"
        )
    return nbytes


def _share(limit: HostLimit, processes: int) -> int:
    return limit.nbytes if limit.per_process else limit.nbytes // processes


def _allowance(limit: HostLimit, processes: int) -> str:
    whose = "1 process" if processes == 1 else f"{processes} processes"
    if processes > 1:
        whose += " each" if limit.per_process else " together"
    return f"{limit.source} allows ({format_bytes(limit.nbytes)} for {whose})"
