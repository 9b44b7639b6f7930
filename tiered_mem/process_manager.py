"""The manager of a process whose code has no place for one of its own, such as one that is told all in YAML."""

from __future__ import annotations

import atexit
import difflib
import inspect
import os
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from .manager import TieringManager

_PREFIX = "TIERED_MEM_"
# Others that begin like ours, and are read elsewhere.
_ELSEWHERE = ("TIERED_MEM_HOST_LIMIT", "TIERED_MEM_REHEARSAL", "TIERED_MEM_TEST_DEVICE")


class DefaultManager:
    """Makes a TieringManager at its first use, of what `configure` was told or else of the environment.

    environment: its variables TIERED_MEM_POLICY, TIERED_MEM_HOST_BYTES and so on stand for the manager's arguments.
        What `configure` says goes before them.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._arguments: dict[str, Any] = {}
        self._manager: TieringManager | None = None
        self._lock = threading.Lock()

    def configure(self, **arguments: Any) -> None:
        """Says with which arguments the manager is to be made, at its first use. A second call adds to them.

        Raises TypeError for a name that TieringManager does not take, and RuntimeError once the manager is made.
        """
        inspect.signature(TieringManager).bind_partial(**arguments)
        with self._lock:
            if self._manager is not None:
                raise RuntimeError(
                    "the default manager is made already: call tiered_mem.configure before its first use"
                )
            self._arguments |= arguments

    def get(self) -> TieringManager:
        """The manager. It is closed when the process ends.

        Raises ValueError for a variable of the environment that means nothing, and what TieringManager raises.
        """
        with self._lock:
            if self._manager is None:
                self._manager = TieringManager(**arguments_of(self._environment) | self._arguments)
                atexit.register(self._manager.close)
            return self._manager


def arguments_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """What the environment says of TieringManager's arguments. Raises ValueError for what means nothing."""
    arguments: dict[str, Any] = {}
    for variable in sorted(environment):
        if not variable.startswith(_PREFIX) or variable in _ELSEWHERE:
            continue
        name = variable.removeprefix(_PREFIX).lower()
        if name not in _READ:
            near = [_PREFIX + match.upper() for match in difflib.get_close_matches(name, _READ, n=1)]
            known = ", ".join(_PREFIX + each.upper() for each in _READ)
            raise ValueError(f"{variable} means nothing; {f'is it {near[0]}?' if near else f'there are {known}'}")
        try:
            arguments[name] = _READ[name](environment[variable])
        except ValueError as error:
            raise ValueError(f"{variable} is {environment[variable]!r}: {error}") from None
    return arguments


def _yes_or_no(text: str) -> bool:
    answers = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in answers:
        raise ValueError(f"write one of {', '.join(answers)}")
    return answers[text.lower()]


def _share_or_size(text: str) -> float | str:
    """0.5 is a share, and 64GiB a size."""
    return float(text) if re.fullmatch(r"\s*\d*\.\d+\s*", text) else text


def _way_to_pin(text: str) -> bool | str:
    return text if text.lower() not in ("true", "false") else text.lower() == "true"


# The arguments that can be written as text, and how they are read.
_READ: dict[str, Callable[[str], Any]] = {
    "policy": str,
    "device_budget": str,
    "slowdown": float,
    "device": str,
    "host_bytes": _share_or_size,
    "pin": _way_to_pin,
    "preallocate": _yes_or_no,
    "spill_dir": str,
    "spill_bytes": str,
    "spill_write_budget": str,
    "spill_checksum": str,
    "steps_in_flight": int,
    "trace": _yes_or_no,
}

_default = DefaultManager(os.environ)
configure = _default.configure
default_manager = _default.get
