"""Whether a command that a document shows could be typed: that its programs, files, modules and options exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.house.blocks import ROOT

# Of every shell or system.
SYSTEM = {"cd", "echo", "export", "git", "mkdir", "numactl", "source", "ulimit"}
# Of frameworks: their own pages say how they are called.
THEIRS = {"llamafactory-cli", "swift"}
# Files of the reader's own.
READERS_FILES = {"first.py", "train.py", "train_7b.py", "tiered_train.py"}
# Modules of frameworks that make test-integrations has, or nobody.
THEIR_MODULES = {"torchtitan.train", "verl.trainer.main_ppo"}


class NoCommand(Exception):
    """It could not be typed, and why."""


def check(text: str) -> None:
    """Raises NoCommand. text: one or several lines of a shell."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        for first, *rest in _commands(line):
            if first in CHECKS:
                CHECKS[first](rest)
            elif first not in SYSTEM | THEIRS:
                raise NoCommand(f"nobody knows the command {first!r} of: {line.strip()}")


def _commands(line: str) -> Iterator[list[str]]:
    """The commands of a line in words, without variables that are set for them, and without redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("&|;"):
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words.pop(0)
            if words:
                yield words
            words = []
        else:
            words.append(word)


def _make(words: list[str]) -> None:
    folder = ROOT
    if words[:1] == ["-C"]:
        folder, words = ROOT / words[1], words[2:]
    targets = set(re.findall(r"^([a-z][\w-]*):", (folder / "Makefile").read_text(), re.MULTILINE))
    if unknown := {word for word in words if "=" not in word} - targets:
        raise NoCommand(f"the Makefile of {folder.name} has no {unknown}")


def _tiered_mem(words: list[str]) -> None:
    from tiered_mem.cli import _parser

    try:
        options, unknown = _parser().parse_known_args(words)
    except SystemExit:  # --help
        return
    except ValueError as error:
        raise NoCommand(f"tiered-mem {' '.join(words)}: {error}") from None
    if unknown or not (options.run or options.version):
        raise NoCommand(f"tiered-mem {' '.join(words)}: {unknown or 'no verb'}")


def _python(words: list[str]) -> None:
    match words:
        case ["-m", "tiered_mem", *rest]:
            _tiered_mem(rest)
        case ["-m", "ascend_emulator", *rest]:
            _emulator(rest)
        case ["-m", "torch.distributed.run", *rest]:
            _torchrun(rest)
        case ["-m", module, *_]:
            _module(module)
        case ["-c", code, *_]:
            compile(code, "-c", "exec")
        case [script, *_]:
            _file(script)


def _emulator(words: list[str]) -> None:
    from ascend_emulator.__main__ import _parse

    try:
        options = _parse(words)
    except SystemExit:
        raise NoCommand(f"python -m ascend_emulator {' '.join(words)}: it does not take that") from None
    _python([*(["-m"] if options.module else ["-c"] if options.code else []), *options.command])


def _torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    try:
        options = get_args_parser().parse_args(words)
    except SystemExit:
        raise NoCommand(f"torchrun {' '.join(words)}: it does not take that") from None
    (_module if options.module else _file)(options.training_script)


def _module(name: str) -> None:
    path = ROOT / name.replace(".", "/")
    there = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
    if not there and name not in THEIR_MODULES | {"pytest", "pip", "mypy", "ruff"}:
        raise NoCommand(f"there is no module {name} to run")


def _file(name: str) -> None:
    if name not in READERS_FILES and not (ROOT / name).is_file():
        raise NoCommand(f"there is no file {name}")


def _pip(words: list[str]) -> None:
    for name, extras in re.findall(r"(\S+)\[([\w,-]+)\]", " ".join(words)):
        folder = ROOT / ("" if name == "tiered_mem" else name)
        project = (folder / "pyproject.toml").read_text() if (folder / "pyproject.toml").exists() else ""
        if missing := [
            extra for extra in extras.split(",") if not re.search(rf"^{extra} = \[", project, re.MULTILINE)
        ]:
            raise NoCommand(f"{name} has no extra {missing}")
    for path in (word for word in words if re.match(r"\.*/", word)):
        if not Path(ROOT, path.partition("[")[0]).exists():
            raise NoCommand(f"there is no folder {path}")


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "ascend-emulator": _emulator,
    "make": _make,
    "pip": _pip,
    "python": _python,
    ".venv/bin/python": _python,
    "tiered-mem": _tiered_mem,
    "torchrun": _torchrun,
}
