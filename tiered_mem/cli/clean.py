"""Remove what dead processes have left in a directory, or in several.

Removes the folders of this user's dead processes below DIR, as each process that starts to spill there does by
itself. Those of live processes and of other users stay. The exit status is 1 if a folder could not be removed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..sizes import format_bytes
from ..spill.folder import Owned, owners, sweep
from .inspect import described, look_into
from .output import console, plain, table, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dirs", metavar="DIR", nargs="+", type=Path, help="what spill_dir was when the files were written"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")


def run(options: argparse.Namespace) -> int:
    paths: list[Path] = options.dirs
    removed = [each for path in paths for each in ([] if options.dry_run else look_into(sweep, path))]
    left = [each for path in paths for each in look_into(owners, path) if not each.alive]
    if options.json:
        write_json(
            {
                "spill_dir": str(paths[0]),
                "spill_dirs": [str(path) for path in paths],
                "dry_run": options.dry_run,
                "removed": [described(each) for each in removed],
                "left": [described(each) for each in left],
            }
        )
    else:
        _show(paths, removed, left, dry_run=options.dry_run)
    return 1 if left and not options.dry_run else 0


def _show(spill_dirs: Sequence[Path], removed: Sequence[Owned], left: Sequence[Owned], *, dry_run: bool) -> None:
    screen = console()
    found = left if dry_run else removed
    if found:
        columns = {"folder": False, "run": False, "process": True, "files": True, "bytes": True}
        rows = [(each.path, each.run, each.pid, each.files, format_bytes(each.nbytes)) for each in found]
        screen.print(table("would be removed" if dry_run else "removed", columns, rows))
    elif not left:
        screen.print(f"no dead process has left files in {plain(', '.join(map(str, spill_dirs)))}")
    if not dry_run:
        for each in left:  # why was logged
            screen.print(plain(f"{each.path} stays, with {each.files} files of {format_bytes(each.nbytes)}"))
