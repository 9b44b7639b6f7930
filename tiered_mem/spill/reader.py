"""Records for people and for the command line: read into numpy, without the manager that wrote them.

The safetensors package could read them too. But it maps the file, so that the process dies where a live owner or
somebody else cuts the file short meanwhile; it compares no checksums, and gives numpy no bfloat16.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import CorruptRecord
from .record import Header, header_bytes_of, parse_header
from .record_io import checksum_by_name

# Not blocking matters for a pipe in a record's place, whose open would wait for a writer.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NUMPY_HAS = {
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "float32", "float64", "complex64", "complex128",
}  # fmt: skip


def read_header(path: str | os.PathLike[str]) -> Header:
    """A record's header. Its data is not read.

    Raises CorruptRecord for a file that is no whole record, and OSError where the system cannot open or read it. A
    link is not followed.
    """
    with _opened(os.fspath(path)) as (_, header):
        return header


def read_record(path: str | os.PathLike[str], verify: bool = True) -> dict[str, np.ndarray[Any, Any]]:
    """A record's entries by name, each an array of shape (elements,) in memory of its own.

    The bytes of a dtype that numpy lacks, such as bfloat16, come as uint8; read_header tells the dtype. verify:
    compare the checksums, if the record has them.

    Raises the errors of read_header, and CorruptRecord for a checksum that differs.
    """
    path = os.fspath(path)
    with _opened(path) as (fd, header):
        checksum = checksum_by_name(header.algorithm if verify else "none")
        arrays = {}
        for entry, offset in zip(header.entries, header.layout().offsets, strict=True):
            array = np.empty(entry.nbytes, np.uint8)
            _read(fd, array.data, offset, path)
            found = checksum.of(array.data)
            if checksum.name != "none" and found != entry.checksum:
                what = f"{checksum.name} of {entry.name!r}"
                raise CorruptRecord(path, what, expected=entry.checksum or "none yet", found=found)
            dtype = np.dtype(entry.dtype if entry.dtype in _NUMPY_HAS else np.uint8)
            arrays[entry.name] = array if entry.nbytes % dtype.itemsize else array.view(dtype)
        return arrays


@contextmanager
def _opened(path: str) -> Iterator[tuple[int, Header]]:
    fd = os.open(path, _FLAGS)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise CorruptRecord(path, "kind of file", expected="a regular file", found=stat.filemode(found.st_mode))
        start = bytearray(min(8, found.st_size))
        _read(fd, memoryview(start), 0, path)
        data = bytearray(header_bytes_of(bytes(start), found.st_size, path))
        _read(fd, memoryview(data), 0, path)
        yield fd, parse_header(bytes(data), found.st_size, path)
    finally:
        os.close(fd)


def _read(fd: int, into: memoryview, offset: int, path: str) -> None:
    while into:
        count = os.preadv(fd, [into], offset)
        if count == 0:
            end = offset + len(into)
            raise CorruptRecord(path, "bytes in the file", expected=f"{end} or more", found=offset)
        into, offset = into[count:], offset + count
