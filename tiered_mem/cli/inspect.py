"""Show whose spill files lie in a directory, and what is in them; or what optimizer.save() has written there.

Lists the folders of this user's processes below DIR, and the records in each. The exit status is 1 if a record is
found to be wrong while all are read (--verify). A live process may write a record while it is read here; such a
record is shown as changing, and is not called wrong.

Of saved optimizer states it lists the groups and the files. The exit status is 1 if a file is not as was written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from ..errors import CorruptRecord, SpillDirRefused
from ..sizes import format_bytes
from ..spill.folder import Owned, owners
from ..spill.home import OWNER, user_of
from ..spill.reader import read_header, read_record
from ..spill.record import NO_HEADER, Header
from .output import byte_bar, console, plain, table, write_json
from .saved import is_saved, show_saved

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Verdict = Literal["whole", "right", "wrong", "unfinished", "changing"]
_T = TypeVar("_T")

_MEANING = {
    "changing": "changing: its process is alive, and may have been writing it",
    "unfinished": "unfinished: its process ended before it was written whole",
}


@dataclass(frozen=True, slots=True)
class _Found:
    """A file of a spill folder.

    state: "whole" is a record whose data was not compared with checksums, "right" and "wrong" are records whose
        data was. "unfinished" is a record whose process died before it was written. "changing" is a file of a live
        process that was not a sound record, or not for long enough: the process may have been writing it. A file
        with a damaged header, or one that cannot be read, is "wrong" too.
    header: None where there is none. problem: the reason why it is not whole or right, else "".
    """

    path: Path
    nbytes: int
    state: Verdict
    header: Header | None = None
    problem: str = ""


@dataclass(slots=True)
class _Seen:
    """A process's folder and its records. problem: the reason why they are not known."""

    owned: Owned
    records: list[_Found] = field(default_factory=list)
    problem: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", type=Path, help="a manager's spill_dir, or the path of a save")
    parser.add_argument("--verify", action="store_true", help="read all records and compare their checksums")


def run(options: argparse.Namespace) -> int:
    if is_saved(options.dir):
        return show_saved(options.dir, verify=options.verify, as_json=options.json)
    owned = look_into(owners, options.dir)
    with byte_bar() as bar:
        task = bar.add_task("verifying", total=sum(each.nbytes for each in owned), visible=options.verify)
        seen = [_look_through(each, options.verify, lambda nbytes: bar.advance(task, nbytes)) for each in owned]
    foreign = _others(options.dir)
    if options.json:
        described_owners = [
            described(each.owned)
            | {"records": [_described(found) for found in each.records]}
            | ({"problem": each.problem} if each.problem else {})
            for each in seen
        ]
        others = [{"path": str(path), "user": user} for path, user in foreign]
        write_json({"spill_dir": str(options.dir), "owners": described_owners, "others": others})
    else:
        _show(options.dir, seen, foreign, console())
    wrong = any(found.state == "wrong" for each in seen for found in each.records)
    return 1 if wrong and options.verify else 0


def _look_through(owned: Owned, verify: bool, advance: Callable[[int], None]) -> _Seen:
    """All files of a folder that may be records."""
    seen = _Seen(owned)
    try:
        names = sorted(name for name in os.listdir(owned.path) if name != OWNER)
    except FileNotFoundError:  # its process has ended, or another has swept it
        return seen
    except PermissionError as error:
        return _Seen(owned, problem=error.strerror or str(error))
    for name in names:
        found = _look(owned.path / name, owned, verify=verify)
        if found is not None:
            seen.records.append(found)
            advance(found.nbytes)
    return seen


def _look(path: Path, owned: Owned, *, verify: bool) -> _Found | None:
    """The state of a file; None where it is gone.

    verify: read all of it, and compare the checksums.
    """
    header = None
    nbytes = 0
    try:
        nbytes = path.lstat().st_size
        header = read_header(path)
        if not verify:
            return _Found(path, nbytes, "whole", header)
        read_record(path)
        if header.algorithm == "none":
            return _Found(path, nbytes, "whole", header, "it has no checksums")
        return _Found(path, nbytes, "right", header)
    except FileNotFoundError:
        return None
    except CorruptRecord as error:
        problem = str(error).removeprefix(f"{path}: ")
        return _Found(path, nbytes, _state(path, header, owned, error), header, problem)
    except OSError as error:
        return _Found(path, nbytes, "wrong", header, error.strerror or str(error))


def _state(path: Path, header: Header | None, owned: Owned, error: CorruptRecord) -> Verdict:
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


def _show(spill_dir: Path, seen: list[_Seen], foreign: list[tuple[Path, str]], screen: Console) -> None:
    if seen:
        columns = {"folder": False, "run": False, "process": True, "state": False, "files": True, "bytes": True}
        rows = [_row(each.owned) for each in seen]
        screen.print(table(f"{seen[0].owned.path.parent}", columns, rows))
    else:
        screen.print(f"no process of this user's has files in {plain(str(spill_dir))}")
    for each in seen:
        if each.records:
            screen.print(_table(each))
        for found in each.records:
            if found.problem:
                screen.print(plain(f"{found.path.name}: {found.problem}"))
        if each.problem:
            screen.print(plain(f"{each.owned.path}: {each.problem}"))
        for state in dict.fromkeys(found.state for found in each.records if found.state in _MEANING):
            screen.print(_MEANING[state])
    for path, user in foreign:
        screen.print(plain(f"{path} is for user {user} alone to look into: run this as that user"))


def _row(owned: Owned) -> list[object]:
    alive = "alive" if owned.alive else "dead"
    return [owned.path.name, owned.run, owned.pid, alive, owned.files, format_bytes(owned.nbytes)]


def _table(each: _Seen) -> Table:
    numbers = ("number", "step", "entries", "bytes", "write")
    names = ("file", "number", "kind", "step", "entries", "bytes", "write", "state")
    records = [_described(found) | {"bytes": format_bytes(found.nbytes)} for found in each.records]
    rows = [[record.get(name, "") for name in names] for record in records]
    return table(each.owned.path.name, {name: name in numbers for name in names}, rows)


def _described(found: _Found) -> dict[str, object]:
    """The file for JSON."""
    about: dict[str, object] = {"file": found.path.name, "state": found.state, "bytes": found.nbytes}
    if found.header is not None:
        header = found.header
        about |= {"run": header.run, "number": header.number, "kind": header.kind, "step": header.step}
        about |= {"entries": len(header.entries), "write": header.write, "checksum": header.algorithm}
    return about | ({"problem": found.problem} if found.problem else {})


def _others(spill_dir: Path) -> list[tuple[Path, str]]:
    """The folders of all other users, and who those are. Empty where this user may not list the directory."""
    with contextlib.suppress(PermissionError):
        found = ((name, user_of(name)) for name in sorted(os.listdir(spill_dir)))
        return [(spill_dir / name, _user(uid)) for name, uid in found if uid not in (None, os.geteuid())]
    return []


def look_into(about: Callable[[Path], _T], spill_dir: Path) -> _T:
    """`ask` for commands that only look: for a missing directory the advice is not to make it."""
    with contextlib.suppress(PermissionError, NotADirectoryError):  # which `ask` puts in words
        try:
            spill_dir.lstat()
        except FileNotFoundError:
            raise SpillDirRefused(
                f"{spill_dir} does not exist, so no spill files are in it; give what was a manager's spill_dir"
            ) from None
    return ask(about, spill_dir)


def ask(about: Callable[[Path], _T], spill_dir: Path) -> _T:
    """Calls `owners` or `sweep`. Raises SpillDirRefused, also for a folder inside a spill_dir."""
    user = user_of(spill_dir.absolute().name)
    if user is not None and spill_dir.is_dir():
        raise SpillDirRefused(
            f"{spill_dir} holds the spill files of user {_user(user)}; give the directory above it, "
            f"{spill_dir.absolute().parent}"
        )
    try:
        return about(spill_dir)
    except PermissionError as error:
        raise SpillDirRefused(
            f"{spill_dir} may not be entered by user {_user(os.geteuid())}; ask its owner, or run this as another"
        ) from error


def described(owned: Owned) -> dict[str, object]:
    """The folder for JSON."""
    return {
        "path": str(owned.path),
        "run": owned.run,
        "pid": owned.pid,
        "alive": owned.alive,
        "files": owned.files,
        "bytes": owned.nbytes,
    }


def _user(uid: int) -> str:
    try:
        return f"{uid} ({pwd.getpwuid(uid).pw_name})"
    except (KeyError, OverflowError):
        return f"{uid}"
