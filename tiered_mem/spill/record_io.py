"""Moves one record between memory and an open file."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..allocators import round_up
from ..errors import CorruptRecord
from .checksums import Checksum
from .files import Files, memory_at, pages
from .record import ALIGNMENT, Header, Layout, parse_header

REQUEST_BYTES = 8 << 20


class RecordIo:
    """Writes records straight from memory and reads them back into it.

    direct: the files are open for direct I/O. Otherwise `write` waits until the record is on the drive, and drops
    it from the page cache.
    """

    def __init__(self, files: Files, checksum: Checksum, *, direct: bool) -> None:
        self._files = files
        self._checksum = checksum
        self._direct = direct

    @property
    def algorithm(self) -> str:
        """The name of the checksums."""
        return self._checksum.name

    def write(
        self, fd: int, header: Header, layout: Layout, pieces: Sequence[Piece], *, reused: bool, moved: Moved
    ) -> Stored:
        """Write a record into a file of its length. Raises OSError.

        header: has an entry for each piece, without checksums. reused: the file may hold another record.
        """
        entries = tuple(
            replace(entry, checksum=self._checksum.of(memory_at(piece.ptr, piece.nbytes)))
            for entry, piece in zip(header.entries, pieces, strict=True)
        )
        header = replace(header, entries=entries)
        encoded = header.encode()
        with pages(len(encoded)) as start:
            if reused:
                # Nobody must take the data for that of the header that was there before.
                self._put(fd, start, ALIGNMENT, 0, moved)
            parts = zip(layout.offsets, pieces, strict=True)
            for ptr, nbytes, offset in _runs((piece.ptr, piece.nbytes, at) for at, piece in parts):
                self._put(fd, ptr, nbytes, offset, moved)
            memory_at(start, len(encoded))[:] = encoded
            self._put(fd, start, len(encoded), 0, moved)
        if not self._direct:
            self._files.sync(fd)
            self._drop_from_cache(fd)
        return Stored(header, layout, encoded)

    def read(self, fd: int, stored: Stored, wanted: Sequence[tuple[int, int]], path: str, moved: Moved) -> None:
        """Read pieces of a record from the file at `path`: the index of each, and the address that it goes to.

        Raises CorruptRecord where the file holds anything else, and OSError; then the memory is undefined.
        """
        self._check_header(fd, stored, path, moved)
        entries, offsets = stored.header.entries, stored.layout.offsets
        for to, nbytes, offset in _runs((ptr, entries[index].nbytes, offsets[index]) for index, ptr in wanted):
            self._get(fd, to, nbytes, offset, path, moved)
        for index, ptr in wanted:
            entry = entries[index]
            found = self._checksum.of(memory_at(ptr, entry.nbytes))
            if found != entry.checksum:
                what = f"{self._checksum.name} of {entry.name}"
                raise CorruptRecord(path, what, expected=entry.checksum, found=found)
        if not self._direct:
            self._drop_from_cache(fd)

    def _check_header(self, fd: int, stored: Stored, path: str, moved: Moved) -> None:
        nbytes = len(stored.encoded)
        with pages(nbytes) as start:
            self._get(fd, start, nbytes, 0, path, moved)
            found = bytes(memory_at(start, nbytes))
        if found != stored.encoded:
            # Which says what is wrong with a damaged one.
            other = parse_header(found, stored.layout.file_bytes, path)
            raise CorruptRecord(path, "another record", expected=_title(stored.header), found=_title(other))

    def _put(self, fd: int, ptr: int, nbytes: int, offset: int, moved: Moved) -> None:
        done = self._move(self._files.pwrite, fd, ptr, nbytes, offset, moved)
        if done < nbytes:
            raise OSError(errno.EIO, f"the drive took {done} of {nbytes} bytes and no more, at {offset}")

    def _get(self, fd: int, ptr: int, nbytes: int, offset: int, path: str, moved: Moved) -> None:
        done = self._move(self._files.pread, fd, ptr, nbytes, offset, moved)
        if done < nbytes:
            raise CorruptRecord(
                path, "length of the file", expected=f"{offset + nbytes} or more", found=offset + done
            )

    def _move(
        self, call: Callable[[int, int, int, int], int], fd: int, ptr: int, nbytes: int, offset: int, moved: Moved
    ) -> int:
        """Calls until all is moved, or nothing moves any more. Returns how many bytes moved."""
        done = 0
        while done < nbytes:
            count = call(fd, ptr + done, min(REQUEST_BYTES, nbytes - done), offset + done)
            if self._direct:
                count -= count % ALIGNMENT  # it goes on at whole blocks only
            if count <= 0:
                break
            done += count
            moved.nbytes += count
        return done

    def _drop_from_cache(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            self._files.advise_dropped(fd)


class Piece(NamedTuple):
    """Memory that becomes an entry of a record.

    name, dtype: as in `Entry`. ptr: an address that is a multiple of 4096. nbytes: its size; the memory behind it,
    up to the next multiple of 4096, is written too.
    """

    name: str
    ptr: int
    nbytes: int
    dtype: str


class Stored(NamedTuple):
    """A written record: its header, the header's bytes, and the places of its parts."""

    header: Header
    layout: Layout
    encoded: bytes


@dataclass(slots=True)
class Moved:
    """Counts the bytes of one operation, which may fail in between."""

    nbytes: int = 0


def _runs(parts: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Parts (ptr, nbytes, offset) in whole blocks, joined where they are neighbours in memory and in the file."""
    start = end = offset = 0
    for ptr, nbytes, at in parts:
        if ptr != end or at - offset != ptr - start:
            yield start, end - start, offset
            start, offset = ptr, at
        end = ptr + round_up(nbytes)
    yield start, end - start, offset


def _title(header: Header) -> str:
    return f"record {header.number} of run {header.run}, write {header.write}"
