"""Chip files and server files: the figures of a modelled machine, read, checked, and handed to the runtime."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ascend_emulator.errors import EmulatorError

_HERE = Path(__file__).parent
_OTHER_NAMES = {"910b": "910b3"}

# What a figure must be, and how it is checked and written; the check raises ValueError.
_Figure = tuple[str, Callable[[Any], str]]


def parse_chip(value: object) -> str:
    """The name of a chip, or the absolute path of a chip file. Raises EmulatorError for what is neither."""
    return _name_or_file("chip", _OTHER_NAMES.get(str(value), str(value)))


def parse_server(value: object) -> str:
    """The same for servers."""
    return _name_or_file("server", str(value))


def figures(chip: str, server: str | None) -> str:
    """All that the runtime's Model wants to know of these two. Without a server it is the chip's usual one.

    Raises EmulatorError with one line for the first thing that is wrong in a file.
    """
    of_chip = _read(_path("chip", chip), _CHIP)
    usual = of_chip.pop("server", None)
    if server is None and usual is None:
        raise EmulatorError(f"{chip} names no usual server, so one must be given: --server NAME (server=...)")
    of_server = _read(_path("server", server or parse_server(usual)), _SERVER)
    return ";".join(f"{key}={figure}" for key, figure in (of_chip | of_server).items())


def _names(kind: str) -> list[str]:
    return sorted(file.stem for file in (_HERE / f"{kind}s").glob("*.toml"))


def _name_or_file(kind: str, text: str) -> str:
    if text in _names(kind):
        return text
    if text.endswith(".toml") and Path(text).is_file():
        return str(Path(text).absolute())  # the program may change its folder
    raise EmulatorError(f"{text!r} is no {kind}; known are {', '.join(_names(kind))}, and FILE.toml")


def _path(kind: str, name: str) -> Path:
    return Path(name) if name.endswith(".toml") else _HERE / f"{kind}s" / f"{name}.toml"


def _read(path: Path, known: Mapping[str, _Figure]) -> dict[str, str]:
    """The figures of a file, checked: by "table.key"."""
    found = {}
    for name, value in _flat(_parse(path)):
        if name not in known:
            raise EmulatorError(f"{path}: unknown key {name}; known are {', '.join(known)}")
        what, check = known[name]
        try:
            found[name] = check(value)
        except (TypeError, ValueError):
            raise EmulatorError(f"{path}: {name} must be {what}, not {value!r}") from None
    optional = (*_HOST_MEMORY, *(() if any(name in _DRIVES for name in found) else _DRIVES))
    needed = [name for name in known if name not in optional]
    if missing := [name for name in needed if name not in found and name != "server"]:
        raise EmulatorError(f"{path}: {missing[0]} is missing; needed are {', '.join(needed)}")
    return found


def _parse(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise EmulatorError(f"{path} cannot be read: {error}") from None


def _flat(content: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield name, value


def _number(is_right: Callable[[float], bool]) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError
        if not (math.isfinite(value) and is_right(value)):
            raise ValueError
        return repr(float(value))

    return check


def _shares(value: Any) -> str:
    rows = [(_POSITIVE[1](least), _SHARE[1](share)) for least, share in value]
    leasts = [float(least) for least, _ in rows]
    if not rows or sorted(set(leasts)) != leasts:
        raise ValueError
    return ",".join(f"{least}:{share}" for least, share in rows)


def _server_name(value: Any) -> str:
    if not isinstance(value, str) or value not in _names("server"):
        raise ValueError
    return value


_POSITIVE = ("a number above 0", _number(lambda number: number > 0))
_COST = ("a number of at least 0", _number(lambda number: number >= 0))
_SHARES = ("rows such as [[2048, 0.7], [4096, 0.86]], the first numbers rising", _shares)
_SHARE = ("a number above 0 and at most 1", _number(lambda number: 0 < number <= 1))

_CHIP: Mapping[str, _Figure] = {
    "server": (f"one of {', '.join(_names('server'))}", _server_name),
    "launch.matrix_us": _COST,
    "launch.vector_us": _COST,
    "matrix.bfloat16": _POSITIVE,
    "matrix.float16": _POSITIVE,
    "matrix.float32": _POSITIVE,
    "matrix.matmul_shares": _SHARES,
    "matrix.attention_shares": _SHARES,
    "matrix.convolution_share": _SHARE,
    "memory.bytes_per_s": _POSITIVE,
    "memory.share": _SHARE,
    "memory.softmax_share": _SHARE,
    "step.factor": _POSITIVE,
    "host.issue_us": _COST,
    "host.event_us": _COST,
    "host.query_us": _POSITIVE,  # or whoever polls would poll for ever
    "host.wait_us": _COST,
    "host.operator_us": _COST,
}
# A server whose drives nobody knows has none of these.
_DRIVES: Mapping[str, _Figure] = {
    "drives.read_bytes_per_s": _POSITIVE,
    "drives.write_bytes_per_s": _POSITIVE,
    "drives.latency_us": _COST,
}
# Without it the cards of a server do not slow each other.
_HOST_MEMORY: Mapping[str, _Figure] = {"host_memory.bytes_per_s": _POSITIVE}
_SERVER: Mapping[str, _Figure] = {
    "link.h2d_bytes_per_s": _POSITIVE,
    "link.d2h_bytes_per_s": _POSITIVE,
    "link.h2d_beside_d2h": _SHARE,
    "link.d2h_beside_h2d": _SHARE,
    "link.pageable_share": _SHARE,
    "link.latency_us": _COST,
    "cards.ring_bytes_per_s": _POSITIVE,
    "cards.pair_bytes_per_s": _POSITIVE,
    "cards.start_us": _COST,
    **_HOST_MEMORY,
    **_DRIVES,
}
