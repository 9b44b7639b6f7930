"""What is in a directory of saved optimizer states, for `inspect`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CorruptRecord
from ..optimizer.saved_folder import check_data, check_shard
from ..optimizer.saved_index import INDEX, SavedIndex, read_index
from ..sizes import format_bytes
from .output import byte_bar, console, plain, table, write_json

if TYPE_CHECKING:
    from rich.console import Console


def is_saved(folder: Path) -> bool:
    """Whether optimizer states were saved there."""
    with contextlib.suppress(PermissionError):  # which is told in other words
        return (folder / INDEX).is_file()
    return False


def show_saved(folder: Path, *, verify: bool, as_json: bool) -> int:
    """Shows the groups and the files, and returns the exit status: 1 if a file is not as it was written.

    verify: read all files, and compare their checksums. Raises CorruptRecord for the index.
    """
    index = read_index(folder)
    with byte_bar() as bar:
        task = bar.add_task("verifying", total=index.nbytes, visible=verify)
        found = [
            _look(folder, shard, index, verify, lambda nbytes: bar.advance(task, nbytes)) for shard in index.shards
        ]
    if as_json:
        write_json(_described(folder, index, found))
    else:
        _show(folder, index, found, console())
    return 1 if any(each.problem for each in found) else 0


@dataclass(frozen=True, slots=True)
class _File:
    """One of the files. nbytes: of the tensors in it. problem: what is wrong with it, else ""."""

    name: str
    entries: int
    nbytes: int
    verified: bool
    problem: str

    @property
    def state(self) -> str:
        if self.problem:
            return "wrong"
        return "right" if self.verified else "whole"


def _look(folder: Path, shard: str, index: SavedIndex, verify: bool, advance: Callable[[int], object]) -> _File:
    problem = ""
    try:
        if verify:
            check_data(folder, shard, index, advance)
        else:
            check_shard(folder, shard, index)
    except CorruptRecord as error:
        problem = str(error).removeprefix(f"{folder / shard}: ")
    except OSError as error:
        problem = error.strerror or str(error)
    sizes = [tensor.nbytes for tensor in index.tensors.values() if tensor.shard == shard]
    return _File(shard, len(sizes), sum(sizes), verify, problem)


def _show(folder: Path, index: SavedIndex, found: Sequence[_File], screen: Console) -> None:
    stateful = sum(isinstance(key, int) for key, _ in index.states)
    screen.print(
        plain(
            f"{folder}: {index.optimizer} with {len(index.params)} parameters, of which {stateful} have a state; "
            f"{len(index.tensors)} tensors, {format_bytes(index.nbytes)}"
        )
    )
    rows = [(number, len(group["params"]), _values(group)) for number, group in enumerate(index.groups)]
    screen.print(table("groups", {"number": True, "parameters": True, "values": False}, rows))
    columns = {"file": False, "entries": True, "bytes": True, "state": False}
    if found:
        files = [(each.name, each.entries, format_bytes(each.nbytes), each.state) for each in found]
        screen.print(table("files", columns, files))
    for each in found:
        if each.problem:
            screen.print(plain(f"{each.name}: {each.problem}"))


def _values(group: Mapping[str, Any]) -> str:
    about = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return ", ".join(f"{key}={_told(value)}" for key, value in about.items())


def _told(value: Any) -> object:
    """What JSON has for it, in fewer words. See docs/saved_states.md."""
    if isinstance(value, dict) and len(value) == 1:
        ((kind, inner),) = value.items()
        return tuple(inner) if kind == "$tuple" else inner
    return value


def _described(folder: Path, index: SavedIndex, found: Sequence[_File]) -> dict[str, object]:
    return {
        "saved_states": str(folder),
        "optimizer": index.optimizer,
        "parameters": len(index.params),
        "states": len(index.states),
        "tensors": len(index.tensors),
        "bytes": index.nbytes,
        "groups": list(index.groups),
        "files": [
            {"file": each.name, "entries": each.entries, "bytes": each.nbytes, "state": each.state}
            | ({"problem": each.problem} if each.problem else {})
            for each in found
        ],
    }
