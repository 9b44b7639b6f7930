"""The index of saved optimizer states: which tensors lie in which files, and all that is no tensor.

docs/saved_states.md has the format. Nothing here needs torch: the command line looks into such a directory where
torch does not load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from ..errors import CorruptRecord
from ..spill.record import STORED

INDEX = "optimizer_states.json"
# torch's dtypes that the files can hold, without "torch.", and their names there.
DTYPES = {name: code for name, (code, _) in STORED.items() if name not in ("complex128", "float4_e2m1fn_x2")}
_FORMAT = "tiered_mem optimizer states"
_VERSION = 1
# The checksum of all that comes after the first line is in it.
_FIRST_LINE = re.compile(rb'\{"xxh3_64":"([0-9a-f]{16})",\n')


@dataclass(frozen=True, slots=True)
class SavedIndex:
    """What is in a directory of saved states.

    optimizer: the name of its class. params: in the order of the groups, by which states are counted. groups: their
    values as JSON has them; "params" are numbers. states: for each key the state as JSON has it, where {"$tensor":
    NAME} stands for a tensor; a key is a parameter's number, or a str for what belongs to no parameter. shards: the
    length in bytes of each file, by its path in the directory.
    """

    optimizer: str
    params: Sequence[SavedParam]
    groups: Sequence[Mapping[str, Any]]
    states: Sequence[tuple[int | str, Any]]
    tensors: Mapping[str, StoredTensor]
    shards: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def encode(self) -> bytes:
        """The text of the index's file."""
        tree = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        # As a line of its own, so that whoever changes one byte of it is found out.
        rest = json.dumps(tree, separators=(",", ":"), allow_nan=False)[1:].encode() + b"\n"
        return b'{"xxh3_64":"' + xxhash.xxh3_64_hexdigest(rest).encode() + b'",\n' + rest


@dataclass(frozen=True, slots=True)
class SavedParam:
    """A parameter of the optimizer. Its values are not saved."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a state or a group.

    shard: the file that it is in, under its name. dtype: without "torch.". stride: None for a contiguous tensor.
    xxh3_64: of its bytes in the file.
    """

    shard: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    nbytes: int
    xxh3_64: str


def read_index(folder: Path) -> SavedIndex:
    """The index of a directory.

    Raises FileNotFoundError where there is none, CorruptRecord where it is not as it was written, and OSError.
    """
    path = folder / INDEX
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{folder} holds no saved optimizer states, as {INDEX} is not there: give the path of optimizer.save()"
        ) from None
    return _parsed(data, str(path))


def _parsed(data: bytes, path: str) -> SavedIndex:
    line = _FIRST_LINE.match(data)
    if line is None:
        raise CorruptRecord(path, "its first line", expected='{"xxh3_64":"...",', found=data[:32])
    told, found = line[1].decode(), xxhash.xxh3_64_hexdigest(data[line.end() :])
    if told != found:
        raise CorruptRecord(path, "checksum of the index", expected=told, found=found)
    try:
        tree = json.loads(data)
        kind = tree["format"], tree["version"]
        if kind != (_FORMAT, _VERSION):
            raise CorruptRecord(path, "format", expected=(_FORMAT, _VERSION), found=kind)
        return SavedIndex(
            tree["optimizer"],
            [SavedParam(tuple(each["shape"]), each["dtype"]) for each in tree["params"]],
            tree["groups"],
            [(key, state) for key, state in tree["states"]],
            {name: _tensor(**each) for name, each in tree["tensors"].items()},
            tree["shards"],
        )
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        raise CorruptRecord(
            path, "values in the index", expected="those of version 1", found=repr(error)
        ) from error


def _tensor(shape: list[int], stride: list[int] | None, **rest: Any) -> StoredTensor:
    return StoredTensor(shape=tuple(shape), stride=None if stride is None else tuple(stride), **rest)
