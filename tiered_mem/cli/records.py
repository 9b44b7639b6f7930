"""Looks at the files of a process that may be writing them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import CorruptRecord
from ..spill.folder import Owned
from ..spill.home import OWNER
from ..spill.reader import read_header, read_record
from ..spill.record import NO_HEADER, Header

State = Literal["whole", "right", "wrong", "unfinished", "changing"]


@dataclass(frozen=True, slots=True)
class Found:
    """A file of a spill folder.

    state: "whole" is a record whose data was not compared with checksums, "right" and "wrong" are records whose
        data was. "unfinished" is a record whose process died before it was written. "changing" is a file of a live
        process that was not a sound record, or not for long enough: the process may have been writing it. A file
        with a damaged header, or one that cannot be read, is "wrong" too.
    header: None where there is none. problem: the reason why it is not whole or right, else "".
    """

    path: Path
    nbytes: int
    state: State
    header: Header | None = None
    problem: str = ""


def files_of(owned: Owned) -> list[Path]:
    """All files that may be records. Raises OSError where this user may not list the folder."""
    try:
        return sorted(owned.path / name for name in os.listdir(owned.path) if name != OWNER)
    except FileNotFoundError:  # its process has ended, or another has swept it
        return []


def look(path: Path, owned: Owned, *, verify: bool) -> Found | None:
    """The state of a file; None where it is gone.

    verify: read all of it, and compare the checksums. Raises ImportError where their package is missing.
    """
    header = None
    nbytes = 0
    try:
        nbytes = path.lstat().st_size
        header = read_header(path)
        if not verify:
            return Found(path, nbytes, "whole", header)
        read_record(path)
        if header.algorithm == "none":
            return Found(path, nbytes, "whole", header, "it has no checksums")
        return Found(path, nbytes, "right", header)
    except FileNotFoundError:
        return None
    except CorruptRecord as error:
        problem = str(error).removeprefix(f"{path}: ")
        return Found(path, nbytes, _state(path, header, owned, error), header, problem)
    except OSError as error:
        return Found(path, nbytes, "wrong", header, error.strerror or str(error))


def _state(path: Path, header: Header | None, owned: Owned, error: CorruptRecord) -> State:
    """The state of a file that is not a sound record.

    A live process zeroes the header before it changes the data, and never writes the same header again. So wrong
    data is certainly wrong only where the header is the same before and after the data was read.
    """
    if not owned.alive:
        # Just made, with no bytes, or not ended.
        return "unfinished" if header is None and error.found in (0, NO_HEADER) else "wrong"
    if header is None:
        return "changing"
    try:
        return "wrong" if read_header(path) == header else "changing"
    except OSError:
        return "changing"
