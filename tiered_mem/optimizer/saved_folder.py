"""The directory of saved optimizer states: a save comes into its place as a whole, and each file is checked.

Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open

from ..errors import CorruptRecord
from .saved_index import DTYPES, INDEX, SavedIndex

# The folder of one save, which is named by nothing else.
_SAVE = re.compile(r"states-[0-9a-f]{8}")
_CHUNK = 1 << 20


class FolderOfSave:
    """A save into a directory: a context, in which files are written into a new folder there, and which ends it.

    Until `commit` the directory has the save from before, and it keeps that where an error ends the context. What a
    process that was killed has left is removed by the next save.

    To begin it raises BlockingIOError where another save into the directory is under way, and OSError.

    path: of the directory, which is made if it is not there. name: of the new folder in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = f"states-{secrets.token_hex(4)}"
        self._made = [each for each in (path, *path.parents) if not each.exists()]
        self._fd: int | None = None
        self._committed = False

    def __enter__(self) -> FolderOfSave:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _lock(self._fd, self.path)
            (self.path / self.name).mkdir()
        except BaseException:
            self._end()
            raise
        return self

    def commit(self, index: SavedIndex) -> None:
        """Everything is on the drive when this returns, and the save from before is gone."""
        mode = (self.path / self.name).stat().st_mode & 0o666  # safetensors' files are this user's alone
        for shard in index.shards:
            (self.path / shard).chmod(mode)
            _sync(self.path / shard)
        _sync(self.path / self.name)
        new = self.path / self.name / INDEX
        with new.open("wb") as file:
            file.write(index.encode())
            file.flush()
            os.fsync(file.fileno())
        for made in self._made:
            _sync(made.parent)
        os.replace(new, self.path / INDEX)
        self._committed = True
        _sync(self.path)
        self._remove_all_but(self.name)

    def __exit__(self, *error: object) -> None:
        self._end()

    def _remove_all_but(self, name: str) -> None:
        for folder in os.listdir(self.path):
            if folder != name and _SAVE.fullmatch(folder):
                shutil.rmtree(self.path / folder, ignore_errors=True)

    def _end(self) -> None:
        if not self._committed:
            shutil.rmtree(self.path / self.name, ignore_errors=True)
            for made in self._made:
                with contextlib.suppress(OSError):  # it was not made after all, or something else is in it by now
                    made.rmdir()
        if self._fd is not None:
            os.close(self._fd)  # which unlocks it, too


def check_shard(folder: Path, shard: str, index: SavedIndex) -> dict[str, int]:
    """Where in the file each tensor begins. Raises CorruptRecord for a file that the index does not describe."""
    path = folder / shard
    expected = {name: tensor for name, tensor in index.tensors.items() if tensor.shard == shard}
    try:
        found = path.stat().st_size
        if found != index.shards[shard]:
            raise CorruptRecord(str(path), "length of the file", expected=index.shards[shard], found=found)
        with safe_open(path, "np"):  # which looks whether its tensors fill it, without a hole
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except FileNotFoundError:
        raise CorruptRecord(str(path), "the file", expected=f"{index.shards[shard]} bytes", found="none") from None
    except (SafetensorError, ValueError) as error:
        raise CorruptRecord(str(path), "its header", expected="that of safetensors", found=str(error)) from error
    header.pop("__metadata__", None)
    if header.keys() != expected.keys():
        missing, strange = sorted(expected.keys() - header.keys()), sorted(header.keys() - expected.keys())
        raise CorruptRecord(str(path), "names of tensors", expected=missing or "no others", found=strange or "none")
    for name, tensor in expected.items():
        entry = header[name]
        kinds = (DTYPES[tensor.dtype], list(tensor.shape)), (entry["dtype"], entry["shape"])
        if kinds[0] != kinds[1]:
            raise CorruptRecord(str(path), f"dtype and shape of {name!r}", expected=kinds[0], found=kinds[1])
    return {name: 8 + length + header[name]["data_offsets"][0] for name in expected}


def check_data(
    folder: Path, shard: str, index: SavedIndex, advance: Callable[[int], object] = lambda nbytes: None
) -> None:
    """Reads a file and compares all checksums in it. Raises CorruptRecord, and OSError.

    advance: is given how many bytes have been read, piece by piece.
    """
    path = folder / shard
    offsets = check_shard(folder, shard, index)
    with path.open("rb") as file:
        for name, offset in sorted(offsets.items(), key=lambda item: item[1]):
            tensor = index.tensors[name]
            checksum = xxhash.xxh3_64()
            file.seek(offset)
            for nbytes in _chunks(tensor.nbytes):
                data = file.read(nbytes)
                checksum.update(data)
                advance(len(data))
            check_sum(path, name, tensor.xxh3_64, checksum.hexdigest())


def check_sum(path: Path, name: str, expected: str, found: str) -> None:
    """Raises CorruptRecord for another checksum than that of the index."""
    if found != expected:
        raise CorruptRecord(str(path), f"xxh3_64 of {name!r}", expected=expected, found=found)


def _chunks(nbytes: int) -> Iterable[int]:
    return (min(_CHUNK, nbytes - start) for start in range(0, nbytes, _CHUNK))


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(
            errno.EWOULDBLOCK,
            "another save into this directory is under way: let one process save, or give each a directory",
            str(path),
        ) from None
    except OSError as error:
        # Some file systems on a network have no locks.
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
