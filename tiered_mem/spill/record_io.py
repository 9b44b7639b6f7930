"""Moves one record between memory and an open file, with checksums of its data."""

from __future__ import annotations

import contextlib
import errno
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import xxhash

from ..allocators.base import round_up
from ..errors import CorruptRecord
from .filesystem import Files, memory_at, pages
from .lower_tier import Piece
from .record import ALIGNMENT, DIGITS, Header, Layout, parse_header

REQUEST_BYTES = 8 << 20


@dataclass(slots=True)
class RecordIo:
    """Writes a record straight from memory, or reads it back into memory. One serves for one operation.

    direct: the file is open for direct I/O. Otherwise `write` waits until the record is on the drive, and drops it
    from the page cache. header: has an entry for each piece, with checksums where it is to be read. layout: the
    header's. moved: the bytes that were moved, also where the operation failed.
    """

    files: Files
    checksum: Checksum
    direct: bool
    header: Header
    layout: Layout
    moved: int = 0

    def write(self, fd: int, pieces: Sequence[Piece], *, reused: bool) -> tuple[Header, bytes]:
        """Write a record into a file of its length. Returns its header with checksums, also encoded.

        reused: the file may hold another record. Raises OSError.
        """
        entries = tuple(
            replace(entry, checksum=self.checksum.of(self.files.contents(piece.ptr, piece.nbytes)))
            for entry, piece in zip(self.header.entries, pieces, strict=True)
        )
        header = replace(self.header, entries=entries)
        encoded = header.encode()
        with pages(len(encoded)) as start:
            if reused:
                # Nobody must take the data for that of the header that was there before.
                self._put(fd, start, ALIGNMENT, 0)
            parts = zip(self.layout.offsets, pieces, strict=True)
            for ptr, nbytes, offset in _runs((piece.ptr, piece.nbytes, at) for at, piece in parts):
                self._put(fd, ptr, nbytes, offset)
            memory_at(start, len(encoded))[:] = encoded
            self._put(fd, start, len(encoded), 0)
        if not self.direct:
            self.files.sync(fd)
            self._drop_from_cache(fd)
        return header, encoded

    def read(self, fd: int, encoded: bytes, wanted: Sequence[tuple[int, int]], path: str) -> None:
        """Read pieces of a record from the file at `path`: the index of each, and the address that it goes to.

        encoded: the header, as it was written.

        Raises CorruptRecord where the file holds anything else, and OSError; then the memory is undefined.
        """
        self._check_header(fd, encoded, path)
        entries, offsets = self.header.entries, self.layout.offsets
        for to, nbytes, offset in _runs((ptr, entries[index].nbytes, offsets[index]) for index, ptr in wanted):
            self._get(fd, to, nbytes, offset, path)
        for index, ptr in wanted:
            entry = entries[index]
            found = self.checksum.of(self.files.contents(ptr, entry.nbytes))
            if found != entry.checksum:
                what = f"{self.checksum.name} of {entry.name}"
                raise CorruptRecord(path, what, expected=entry.checksum, found=found)
        if not self.direct:
            self._drop_from_cache(fd)

    def _check_header(self, fd: int, encoded: bytes, path: str) -> None:
        nbytes = len(encoded)
        with pages(nbytes) as start:
            self._get(fd, start, nbytes, 0, path)
            found = bytes(memory_at(start, nbytes))
        if found != encoded:
            # Which says what is wrong with a damaged one.
            other = parse_header(found, self.layout.file_bytes, path)
            raise CorruptRecord(path, "another record", expected=_title(self.header), found=_title(other))

    def _put(self, fd: int, ptr: int, nbytes: int, offset: int) -> None:
        done = self._move(self.files.pwrite, fd, ptr, nbytes, offset)
        if done < nbytes:
            raise OSError(errno.EIO, f"the drive took {done} of {nbytes} bytes and no more, at {offset}")

    def _get(self, fd: int, ptr: int, nbytes: int, offset: int, path: str) -> None:
        done = self._move(self.files.pread, fd, ptr, nbytes, offset)
        if done < nbytes:
            raise CorruptRecord(
                path, "length of the file", expected=f"{offset + nbytes} or more", found=offset + done
            )

    def _move(self, call: Callable[[int, int, int, int], int], fd: int, ptr: int, nbytes: int, offset: int) -> int:
        """Calls until all is moved, or nothing moves any more. Returns how many bytes moved."""
        done = 0
        while done < nbytes:
            count = call(fd, ptr + done, min(REQUEST_BYTES, nbytes - done), offset + done)
            if self.direct:
                count -= count % ALIGNMENT  # it goes on at whole blocks only
            if count <= 0:
                break
            done += count
            self.moved += count
        return done

    def _drop_from_cache(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            self.files.advise_dropped(fd)


@dataclass(frozen=True, slots=True)
class Checksum:
    """A kind of checksum.

    of: of contiguous memory, as lower-case hex digits. Nothing is copied, and the GIL is released while it works on
    large data.
    """

    name: str
    of: Callable[[memoryview], str]


def checksum_by_name(name: str | None) -> Checksum:
    """One of DIGITS; "xxh3_64" for None. Raises ValueError for another name."""
    if name not in (None, *DIGITS):
        raise ValueError(f"{name!r} is no checksum; there are {', '.join(DIGITS)}, and None for the fastest")
    if name in (None, "xxh3_64"):
        return Checksum("xxh3_64", xxhash.xxh3_64_hexdigest)
    if name == "none":
        return Checksum("none", lambda data: "")
    return Checksum("crc32", lambda data: f"{zlib.crc32(data):08x}")


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
