"""The options of the emulated device: checked, and handed on in environment variables."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from ascend_emulator.errors import EmulatorError
from ascend_emulator.faults import Fault
from ascend_emulator.machines import figures, parse_chip, parse_server

# What can be chosen from outside for a program that does not choose it itself.
FROM_OUTSIDE = ("schedule", "seed", "races", "timeline", "clock", "server", "dry", "dry_value", "dry_routing")
_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


@dataclass(frozen=True)
class Options:
    """The options of start() in their final form. A limit or rate of 0 is none.

    Raises EmulatorError where they do not go together, and for what is wrong in a chip or server file.
    """

    hbm_bytes: int = 8 << 30
    host_bytes: int = 0
    h2d_bytes_per_s: int = 0
    d2h_bytes_per_s: int = 0
    stack: str = "current"
    devices: int = 1
    schedule: str = "eager"
    seed: int = 0
    races: bool = False
    poison: bool = True
    faults: tuple[Fault, ...] = ()
    timeline: Path | None = None
    clock: str | None = None
    server: str | None = None
    host_memory_bytes_per_s: int = 0
    host_operators: bool = False
    dry: bool = False
    dry_value: float = 0
    dry_routing: str = "refused"
    over_real_cann: bool = False
    model: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.clock is None and self.server is not None:
            raise EmulatorError(
                "a server is there for modelled time, so it needs a clock: --clock CHIP (clock=...)"
            )
        if self.clock is None and self.host_memory_bytes_per_s:
            raise EmulatorError("the host memory's rate needs a clock: --clock CHIP (clock=...)")
        if self.clock is None and self.host_operators:
            raise EmulatorError("what operators cost the host needs a clock: --clock CHIP (clock=...)")
        self._check_dry()
        model = figures(self.clock, self.server) if self.clock else ""
        object.__setattr__(self, "model", model)

    def _check_dry(self) -> None:
        if not self.dry:
            if self.dry_value or self.dry_routing != "refused":
                raise EmulatorError("a dry value, and dry routing, are for dry runs: --dry (dry=True)")
            return
        if self.clock is None:
            raise EmulatorError(
                "a dry run takes modelled time alone, so it needs a clock: --clock CHIP (clock=...)"
            )
        if self.races:
            raise EmulatorError("a dry run touches no memory, so it has no races; look for them without --dry")
        if self.schedule != "eager":
            raise EmulatorError(
                f"a dry run computes nothing, now or later, so it has no {self.schedule} schedule; leave that out"
            )

    @classmethod
    def of(cls, given: Mapping[str, object], environment: Mapping[str, str]) -> "Options":
        """Checks what was given; None there stands for the environment's choice, if it may choose, or the default.

        Raises EmulatorError for the first value that means nothing.
        """
        chosen = {name: _PARSERS[name](value) for name, value in given.items() if value is not None}
        return cls(**_read(environment, (name for name in FROM_OUTSIDE if name not in chosen)), **chosen)

    @classmethod
    def inherited(cls, environment: Mapping[str, str]) -> "Options":
        """The options that environment() of a parent process has written. Raises EmulatorError as of() does."""
        return cls(**_read(environment, (each.name for each in fields(cls) if each.init)))

    def environment(self) -> dict[str, str]:
        """The variables for the runtime and for child processes: all of them, for a parent's may be there."""
        return {_variable(each.name): _text(getattr(self, each.name)) for each in fields(self)}


def parse_bytes(size: int | str) -> int:
    """A number of bytes, at least 1, from an int or a string such as "2GiB" or "4GB"."""
    nbytes = _parse_size(size)
    if nbytes < 1:
        raise EmulatorError(f"a size must be at least 1 byte, not {size!r}")
    return nbytes


def parse_limit(size: int | str) -> int:
    """A number of bytes; 0 stands for no limit."""
    return _parse_size(size)


def parse_rate(rate: int | str) -> int:
    """Bytes per second, from an int or a string such as "4GB/s"; 0 stands for no limit."""
    return _parse_size(rate, per="(?:/s)?")


def _parse_size(size: int | str, per: str = "") -> int:
    match = re.fullmatch(rf"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*){per}\s*", str(size))
    if match is None or match[2] not in _UNITS:
        raise EmulatorError(f'{size!r} is not a size; write it like 4096, "512MiB", "2GB" or "4GB/s"')
    return int(Fraction(match[1]) * _UNITS[match[2]])


def _variable(name: str) -> str:
    return f"ASCEND_EMULATOR_{name.upper()}"


def _read(environment: Mapping[str, str], names: Iterable[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        if text := environment.get(_variable(name)):
            try:
                found[name] = _PARSERS[name](text)
            except EmulatorError as error:
                raise EmulatorError(f"{_variable(name)} in the environment: {error}") from None
    return found


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        return ";".join(map(str, value))
    return "" if value is None else str(value)


def _choice(what: str, *known: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in known:
            names = [repr(name) for name in known]
            raise EmulatorError(f"unknown {what} {value!r}; known are {', '.join(names[:-1])} and {names[-1]}")
        return str(value)

    return parse


def _count(what: str, low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if not re.fullmatch("[0-9]+", str(value)) or not low <= int(value) <= high:
            raise EmulatorError(f"{what} must be a whole number from {low} to {high}, not {value!r}")
        return int(value)

    return parse


def _switch(what: str) -> Callable[[Any], bool]:
    def parse(value: Any) -> bool:
        if str(value) not in ("True", "False", "0", "1"):
            raise EmulatorError(f"{what} must be True or False (1 or 0 in the environment), not {value!r}")
        return str(value) in ("True", "1")

    return parse


def _parse_faults(value: Any) -> tuple[Fault, ...]:
    parts = value.split(";") if isinstance(value, str) else value
    faults = tuple(part if isinstance(part, Fault) else Fault.parse(part) for part in parts)
    functions = [fault.function for fault in faults]
    if twice := next((name for name in functions if functions.count(name) > 1), None):
        raise EmulatorError(f"{twice} has two faults; a function can have one at a time")
    return faults


def _number(what: str) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise EmulatorError(f"{what} must be a number, not {value!r}")
        return number

    return parse


def _parse_timeline(value: Any) -> Path:
    path = Path(value).absolute()  # the program may change its folder
    if path.is_dir() or not path.parent.is_dir():
        raise EmulatorError(f"the timeline cannot be written to {str(value)!r}; that must be a file in a folder")
    return path


_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "hbm_bytes": parse_bytes,
    "host_bytes": parse_limit,
    "h2d_bytes_per_s": parse_rate,
    "d2h_bytes_per_s": parse_rate,
    "stack": _choice("stack", "current", "old"),
    "devices": _count("devices", 1, 16),
    "schedule": _choice("schedule", "eager", "late", "random"),
    "seed": _count("seed", 0, (1 << 64) - 1),
    "races": _switch("races"),
    "poison": _switch("poison"),
    "faults": _parse_faults,
    "timeline": _parse_timeline,
    "clock": parse_chip,
    "server": parse_server,
    "host_memory_bytes_per_s": parse_rate,
    "host_operators": _switch("host_operators"),
    "dry": _switch("dry"),
    "dry_value": _number("the dry value"),
    "dry_routing": _choice("dry routing", "refused", "uniform"),
    "over_real_cann": _switch("over_real_cann"),
}
