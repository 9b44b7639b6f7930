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

from .errors import TieredMemError
from .manager import TieringManager
from .sizes import parse_bytes

_PREFIX = "TIERED_MEM_"
# Others that begin like ours, and are read elsewhere.
_ELSEWHERE = ("TIERED_MEM_HOST_LIMIT", "TIERED_MEM_REHEARSAL", "TIERED_MEM_TEST_DEVICE")

_SHOWN = 40


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

        Args:
            **arguments: Those of TieringManager.

        Raises:
            TypeError: TieringManager does not take an argument of this name.
            RuntimeError: The manager is made already.
        """
        inspect.signature(TieringManager).bind_partial(**arguments)
        with self._lock:
            if self._manager is not None:
                raise RuntimeError(
                    "the default manager is made already: call tiered_mem.configure before its first use"
                )
            self._arguments |= arguments

    def get(self) -> TieringManager:
        """The manager of the process. It is closed when the process ends.

        Returns:
            The same one each time.

        Raises:
            ValueError: A variable of the environment means nothing. What TieringManager raises comes out too, with
                the variables that it was made with.
        """
        with self._lock:
            if self._manager is None:
                read = arguments_of(self._environment)
                try:
                    self._manager = TieringManager(**read | self._arguments)
                except (TieredMemError, TypeError, ValueError) as error:
                    told = [variable_of(name) for name in read if name not in self._arguments]
                    said = ", ".join(f"{variable}={_shortened(self._environment[variable])}" for variable in told)
                    if said:
                        error.args = (f"{error}. In the environment there is {said}",)
                    raise
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
            near = [variable_of(match) for match in difflib.get_close_matches(name, _READ, n=1)]
            known = ", ".join(map(variable_of, _READ))
            raise ValueError(f"{variable} means nothing; {f'is it {near[0]}?' if near else f'there are {known}'}")
        try:
            arguments[name] = _READ[name](environment[variable])
        except ValueError as error:
            raise ValueError(f"{variable} is {_shortened(environment[variable])!r}: {error}") from None
    return arguments


def variable_of(argument: str) -> str:
    """Such as TIERED_MEM_HOST_BYTES."""
    return _PREFIX + argument.upper()


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _yes_or_no(text: str) -> bool:
    answers = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in answers:
        raise ValueError(f"write one of {', '.join(answers)}")
    return answers[text.lower()]


def _size(text: str) -> str:
    parse_bytes(text)
    return text


def _directories(text: str) -> str | list[str]:
    """One, or several with ":" between them, as in PATH."""
    paths = text.split(os.pathsep)
    if "" in paths[1:] or not paths[0]:
        raise ValueError(f"write a directory, or several with {os.pathsep!r} between two")
    return paths if len(paths) > 1 else text


def _share_or_size(text: str) -> float | str:
    """0.5 is a share, and 64GiB a size."""
    if re.fullmatch(r"\s*\d*\.\d+\s*", text):
        return float(text)
    return text if text == "auto" else _size(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("write a number such as 0.05") from None


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("write a whole number such as 2")
    return int(text)


def _way_to_pin(text: str) -> bool | str:
    return text if text.lower() not in ("true", "false") else text.lower() == "true"


# The arguments that can be written as text, and how they are read.
_READ: dict[str, Callable[[str], Any]] = {
    "policy": str,
    "device_budget": _size,
    "slowdown": _number,
    "device": str,
    "host_bytes": _share_or_size,
    "pin": _way_to_pin,
    "preallocate": _yes_or_no,
    "spill_dir": _directories,
    "spill_bytes": _size,
    "spill_write_budget": _size,
    "spill_checksum": str,
    "node_bytes": _share_or_size,
    "node_spill_bytes": _size,
    "node_spill_write_budget": _size,
    "steps_in_flight": _count,
    "trace": _yes_or_no,
    "hold_signals": _yes_or_no,
}

_default = DefaultManager(os.environ)
configure = _default.configure
default_manager = _default.get
