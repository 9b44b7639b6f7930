"""The folders in a spill_dir: this user's, and those of others."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..errors import SpillDirRefused
from ..spill.folder import Owned
from ..spill.home import user_of

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Other:
    """The folder for another user's spill files, which that user alone may enter."""

    path: Path
    user: str


def others(spill_dir: Path) -> list[Other]:
    """The folders of all other users. Empty where this user may not list the directory."""
    with contextlib.suppress(PermissionError):
        found = ((name, user_of(name)) for name in sorted(os.listdir(spill_dir)))
        return [Other(spill_dir / name, _user(uid)) for name, uid in found if uid not in (None, os.geteuid())]
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
