"""The states of an optimizer, from their buckets into files and back, one bucket at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import CorruptRecord
from ..ground.interrupts import interruptible
from .bucket import Bucket, fetch_ahead
from .layout import Param, State, leaves, params_of, put_leaf, spread_of
from .saved_folder import FolderOfSave, check_data, check_shard, check_sum
from .saved_index import SavedIndex, SavedParam, StoredTensor, read_index
from .saved_values import ValueEncoder, decoded, dtype_name

# Room for counters on the CPU in the file of a bucket that is full.
_BESIDE = 64 << 10
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


class StatesWriter:
    """Writes the states of one optimizer into a directory, once.

    limit: the bytes of tensors in a file, but for small ones, and unless one alone is larger.

    Raises what `check_can_be_saved` does.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, limit: int) -> None:
        self._optimizer = type(optimizer).__name__
        check_can_be_saved(optimizer)
        self._params = [_described(param) for param in params_of(optimizer)]
        self._limit = limit + _BESIDE
        self._values = ValueEncoder(self._optimizer)
        self._tensors: dict[str, StoredTensor] = {}
        self._shards: dict[str, int] = {}

    def write(
        self, path: Path, packed: Mapping[str, Any], own: Mapping[Any, Any], buckets: Sequence[Bucket]
    ) -> None:
        """Writes all of it, which takes the place of what is there.

        packed: a state_dict with a key in place of each state. own: the states that are in no bucket, by key.

        Raises TypeError for what such files cannot hold, before anything is written. Raises OSError and what the
        residences raise; then the directory has what it had before.
        """
        encoded, sources = self._values.encoded, self._values.sources
        groups = [encoded(f"group.{number}", group) for number, group in enumerate(packed["param_groups"])]
        bucket_of = {param: bucket for bucket in buckets for param in bucket.states}
        names: dict[Bucket | None, list[str]] = {None: list(sources)}
        states = []
        for name, key in packed["state"].items():
            if type(name) not in (int, str):
                raise TypeError(
                    f"{self._optimizer} has a state of {name!r}, which is neither one of its parameters nor a str: "
                    "save what state_dict() gives in another way"
                )
            bucket, known = bucket_of.get(key), len(sources)
            state = own[key] if bucket is None else bucket.states[key]
            fields = () if bucket is None else bucket.fields.get(key, ())
            states.append((name, encoded(str(name), state, {field.path: field for field in fields})))
            names.setdefault(bucket, []).extend(islice(sources, known, None))
        with FolderOfSave(path) as folder:
            self._write_part(folder, names.pop(None), None)
            parts = [bucket for bucket in buckets if names.get(bucket)]
            for index, bucket in enumerate(parts):
                fetch_ahead(parts[index + 1 :])
                residence = bucket.residence if bucket.away() else None
                with nullcontext() if residence is None else residence.on_host() as flat:
                    self._write_part(folder, names[bucket], flat)
            folder.commit(SavedIndex(self._optimizer, self._params, groups, states, self._tensors, self._shards))

    def _write_part(self, folder: FolderOfSave, names: Sequence[str], flat: torch.Tensor | None) -> None:
        """Writes tensors into files. flat: the bytes of those that are away."""
        sources, start = self._values.sources, 0
        while start < len(names):
            end, nbytes = start + 1, sources[names[start]].nbytes
            while end < len(names) and nbytes + sources[names[end]].nbytes <= self._limit:
                nbytes += sources[names[end]].nbytes
                end += 1
            self._write_shard(folder, {name: sources[name].read(flat) for name in names[start:end]})
            start = end

    def _write_shard(self, folder: FolderOfSave, tensors: Mapping[str, torch.Tensor]) -> None:
        shard = f"{folder.name}/{len(self._shards):05}.safetensors"
        sums, self._shards[shard] = _written(tensors, folder.path / shard)
        for name, tensor in tensors.items():
            stride = self._values.sources[name].stride
            about = dtype_name(tensor.dtype), tuple(tensor.shape), stride, tensor.nbytes, sums[name]
            self._tensors[name] = StoredTensor(shard, *about)


class SavedStates:
    """Saved states in a directory, which are read when they are asked for.

    Raises FileNotFoundError, CorruptRecord and OSError for a directory that has no sound index.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = read_index(folder)
        self._states = dict(self._index.states)
        self._opened: tuple[Path | None, Any] = None, None

    @property
    def names(self) -> Sequence[int | str]:
        """What there is a state of, as it is named in a state_dict."""
        return list(self._states)

    def check(self, optimizer: torch.optim.Optimizer, *, data: bool) -> None:
        """Raises ValueError for what is another optimizer's, and CorruptRecord for files that are not as written.

        data: read all of them, and compare their checksums.
        """
        check_can_be_saved(optimizer)
        self._check_optimizer(type(optimizer).__name__, optimizer.param_groups, params_of(optimizer))
        for shard in self._index.shards:
            if data:
                check_data(self._folder, shard, self._index)
            else:
                check_shard(self._folder, shard, self._index)

    def groups(self) -> list[dict[str, Any]]:
        """The groups as in a state_dict. Raises what `state` does."""
        return [decoded(group, self._copied) for group in self._index.groups]

    def state(self, name: int | str) -> State:
        """A state on the CPU. Raises CorruptRecord and OSError.

        Its tensors are the file itself, of which the system reads what is used: see `own_tensors`.
        """
        state: State = decoded(self._states[name], self._mapped)
        return state

    def _check_optimizer(self, name: str, groups: Sequence[dict[str, Any]], params: Sequence[Param]) -> None:
        index, where = self._index, f"the states in {self._folder}"
        if index.optimizer != name:
            raise ValueError(f"{where} are those of {index.optimizer}, and this is {name}")
        saved, here = ([len(group["params"]) for group in some] for some in (index.groups, groups))
        if saved != here:
            raise ValueError(f"{where} are for groups of {saved} parameters, and {name} has groups of {here}")
        saved_names, names = (
            [each for group in some for each in group.get("param_names") or [None] * len(group["params"])]
            for some in (index.groups, groups)
        )
        for number, param in enumerate(params):
            if None not in (saved_names[number], names[number]) and saved_names[number] != names[number]:
                raise ValueError(
                    f"{where} have {saved_names[number]!r} as number {number}, and {name} has {names[number]!r}: "
                    "make its groups of the same parameters in the same order"
                )
            saved_param, found = index.params[number], _described(param)
            if saved_param != found:
                raise ValueError(
                    f"{where} are for a parameter {number} of {saved_param.dtype} {list(saved_param.shape)}, and "
                    f"that of {name} is of {found.dtype} {list(found.shape)}"
                )

    def _copied(self, name: str) -> torch.Tensor:
        return self._mapped(name).clone()

    def _mapped(self, name: str) -> torch.Tensor:
        saved = self._index.tensors[name]
        path = self._folder / saved.shard
        try:
            if self._opened[0] != path:  # its header is read once for neighbours
                self._opened = path, safe_open(path, "pt")
            tensor: torch.Tensor = self._opened[1].get_tensor(name)
        except SafetensorError as error:
            raise CorruptRecord(str(path), f"tensor {name!r}", expected="its bytes", found=str(error)) from error
        check_sum(path, name, saved.xxh3_64, _checksum(tensor))
        if saved.stride is None:
            return tensor
        return torch.empty_strided(saved.shape, saved.stride, dtype=tensor.dtype).copy_(tensor)


def check_can_be_saved(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for an optimizer with another state_dict than torch's, or with a part of each parameter."""
    name = type(optimizer).__name__
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        raise ValueError(
            f"{name} has a state_dict of its own, which makes another format of all states: save what it gives"
        )
    if any(spread_of(param) is not None for param in params_of(optimizer)):
        raise ValueError(
            f"each process has a part of the parameters of {name}, and save() and load() know of one process: "
            "torch.distributed.checkpoint saves and loads the parts, as those of "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)"
        )


def own_tensors(states: Mapping[Any, Any]) -> None:
    """Puts copies in the place of tensors that are on the CPU, one after the other: they may be files."""
    for state in states.values():
        for path, value in leaves(state) if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and value.is_cpu:
                put_leaf(state, path, value.detach().clone())


@interruptible
def _written(tensors: Mapping[str, torch.Tensor], path: Path) -> tuple[dict[str, str], int]:
    """Writes a file, and gives the checksums of its tensors and its length. Raises OSError.

    An interrupt ends it: with many states a save takes minutes.
    """
    sums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    return sums, path.stat().st_size


def _checksum(tensor: torch.Tensor) -> str:
    digest: str = xxhash.xxh3_64_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest


def _described(param: Param) -> SavedParam:
    return SavedParam(tuple(param.shape), dtype_name(param.dtype))
