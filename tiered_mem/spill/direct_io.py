"""Finds out whether files can be read and written past the page cache."""

from __future__ import annotations

import contextlib
import errno
import logging

from ..errors import SpillDirRefused
from .files import Files, memory_at, pages
from .folder import SpillFolder
from .record import ALIGNMENT

_PATTERN = bytes(range(256)) * (ALIGNMENT // 256)

_log = logging.getLogger("tiered_mem.spill")


def direct_io_works(folder: SpillFolder, files: Files) -> bool:
    """Whether direct I/O works in this folder, found by a trial. If it does not, ordinary I/O does.

    Raises SpillDirRefused where neither works.
    """
    try:
        _try(folder, files, "direct.trial", direct=True)
        return True
    except OSError as error:
        refusal = str(error)
    try:
        _try(folder, files, "cached.trial", direct=False)
    except OSError as error:
        raise SpillDirRefused(
            f"a file in {folder.path} cannot be written and read back: {error}. Choose a spill_dir on a local "
            "drive that works and has room"
        ) from error
    _log.info(
        "%s takes no direct I/O (%s): records go through the page cache, and are dropped from it, which costs time",
        *(folder.path, refusal),
    )
    return False


def _try(folder: SpillFolder, files: Files, name: str, *, direct: bool) -> None:
    """Writes and reads a block with the smallest alignment that records use. Raises OSError."""
    fd = files.create(folder, name, direct)
    try:
        with pages(2 * ALIGNMENT) as start:
            ptr = start + ALIGNMENT
            block = memory_at(ptr, ALIGNMENT)
            block[:] = _PATTERN
            written = files.pwrite(fd, ptr, ALIGNMENT, ALIGNMENT)
            block[:] = bytes(ALIGNMENT)
            read = files.pread(fd, ptr, ALIGNMENT, ALIGNMENT)
            if written != ALIGNMENT or read != ALIGNMENT or block != _PATTERN:
                raise OSError(errno.EIO, "what comes back is not what was written")
    finally:
        with contextlib.suppress(OSError):
            files.close(fd)
        files.remove(folder, name)
