"""Remove what dead processes have left in a directory.

Removes the folders of this user's dead processes below DIR, as each process that starts to spill there does by
itself. Those of live processes and of other users stay. The exit status is 1 if a folder could not be removed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..sizes import format_bytes
from ..spill.folder import Owned, owners, sweep
from .folders import ask
from .output import console, plain, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", type=Path, help="what spill_dir was when the files were written")
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")


def run(options: argparse.Namespace) -> int:
    found = ask(_dead, options.dir) if options.dry_run else ask(sweep, options.dir)
    screen = console()
    if found:
        columns = {"folder": False, "run": False, "process": True, "files": True, "bytes": True}
        rows = [(each.path, each.run, each.pid, each.files, format_bytes(each.nbytes)) for each in found]
        screen.print(table("would be removed" if options.dry_run else "removed", columns, rows))
    else:
        screen.print(f"no dead process has left files in {plain(str(options.dir))}")
    if options.dry_run:
        return 0
    left = ask(_dead, options.dir)
    for each in left:  # why was logged
        screen.print(plain(f"{each.path} stays, with {each.files} files of {format_bytes(each.nbytes)}"))
    return 1 if left else 0


def _dead(spill_dir: Path) -> Sequence[Owned]:
    return [each for each in owners(spill_dir) if not each.alive]
