"""Show whose spill files lie in a directory, and what is in them.

Lists the folders of this user's processes below DIR, and the records in each. The exit status is 1 if a record is
found to be wrong while all are read (--verify). A live process may write a record while it is read here; such a
record is shown as changing, and is not called wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..sizes import format_bytes
from ..spill.folder import Owned, owners
from .folders import Other, described, look_into, others
from .output import byte_bar, console, plain, table, write_json
from .records import Found, files_of, look

_MEANING = {
    "changing": "changing: its process is alive, and may have been writing it",
    "unfinished": "unfinished: its process ended before it was written whole",
}


@dataclass(slots=True)
class _Seen:
    """A process's folder and its records. problem: the reason why they are not known."""

    owned: Owned
    records: list[Found] = field(default_factory=list)
    problem: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", type=Path, help="what spill_dir was when the files were written")
    parser.add_argument("--verify", action="store_true", help="read all records and compare their checksums")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")


def run(options: argparse.Namespace) -> int:
    owned = look_into(owners, options.dir)
    with byte_bar() as bar:
        task = bar.add_task("verifying", total=sum(each.nbytes for each in owned), visible=options.verify)
        seen = [_seen(each, options.verify, lambda nbytes: bar.advance(task, nbytes)) for each in owned]
    foreign = others(options.dir)
    if options.json:
        write_json(
            {
                "spill_dir": str(options.dir),
                "owners": [_described(each) for each in seen],
                "others": [{"path": str(other.path), "user": other.user} for other in foreign],
            }
        )
    else:
        _show(options.dir, seen, foreign, console())
    wrong = any(found.state == "wrong" for each in seen for found in each.records)
    return 1 if wrong and options.verify else 0


def _seen(owned: Owned, verify: bool, advance: Callable[[int], None]) -> _Seen:
    try:
        return _Seen(owned, list(_records(owned, verify, advance)))
    except PermissionError as error:
        return _Seen(owned, problem=error.strerror or str(error))


def _records(owned: Owned, verify: bool, advance: Callable[[int], None]) -> Iterator[Found]:
    for path in files_of(owned):
        found = look(path, owned, verify=verify)
        if found is not None:
            yield found
            advance(found.nbytes)


def _show(spill_dir: Path, seen: list[_Seen], foreign: list[Other], screen: Console) -> None:
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
    for other in foreign:
        screen.print(plain(f"{other.path} is for user {other.user} alone to look into: run this as that user"))


def _row(owned: Owned) -> list[object]:
    alive = "alive" if owned.alive else "dead"
    return [owned.path.name, owned.run, owned.pid, alive, owned.files, format_bytes(owned.nbytes)]


def _table(each: _Seen) -> Table:
    numbers = ("number", "step", "entries", "bytes", "write")
    names = ("file", "number", "kind", "step", "entries", "bytes", "write", "state")
    rows = []
    for found in each.records:
        header = found.header
        about = ("",) * 4 if header is None else (header.number, header.kind, header.step, len(header.entries))
        write = "" if header is None else header.write
        rows.append([found.path.name, *about, format_bytes(found.nbytes), write, found.state])
    return table(each.owned.path.name, {name: name in numbers for name in names}, rows)


def _described(each: _Seen) -> dict[str, object]:
    records = []
    for found in each.records:
        one: dict[str, object] = {"file": found.path.name, "state": found.state, "bytes": found.nbytes}
        if found.header is not None:
            header = found.header
            one |= {"run": header.run, "number": header.number, "kind": header.kind, "step": header.step}
            one |= {"entries": len(header.entries), "write": header.write, "checksum": header.algorithm}
        records.append(one | ({"problem": found.problem} if found.problem else {}))
    return described(each.owned) | {"records": records} | ({"problem": each.problem} if each.problem else {})
