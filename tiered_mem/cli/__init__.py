"""The command line, `tiered-mem`. `import tiered_mem` does not bring it in, nor rich."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

from ..errors import TieredMemError
from ..versions import versions
from . import check, clean, inspect, plan, plot, probe, report
from .output import check_rich, plain, write_json

_VERBS = {
    "check": check,
    "probe": probe,
    "inspect": inspect,
    "clean": clean,
    "plan": plan,
    "plot": plot,
    "report": report,
}
_REFUSED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `tiered-mem` and return its exit status: 0, 1 where something is wrong, 2 where it cannot be run.

    arguments: without the program's name; by default those of the process.
    """
    try:
        with _files_removed_at_the_end():
            options, unknown = _parser().parse_known_args(arguments)
            if unknown:
                options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
            if options.version:
                _tell_versions(as_json=options.json)
                return 0
            if options.run is None:
                options.parser.error("the following arguments are required: VERB")
            check_rich()
            status: int = options.run(options)
            return status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    # ImportError: of the package for tables, or for pictures.
    except (TieredMemError, OSError, ValueError, ImportError) as error:
        sys.stderr.write(f"tiered-mem: {plain(' '.join(str(error).split()))}\n")
        return _REFUSED


class _Parser(argparse.ArgumentParser):
    """A parser that neither ends the process because of its arguments nor prints its usage unasked."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    what = "Looks at what tiered_mem runs on, at its spill files and traces, and plans trainings."
    parser = _Parser(prog="tiered-mem", description=what)
    parser.add_argument("--version", action="store_true", help="tell the versions of all that it runs on, and exit")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    parser.set_defaults(run=None, parser=parser)
    verbs = parser.add_subparsers(title="what to do", metavar="VERB")
    for name, verb in _VERBS.items():
        about = verb.__doc__ or ""
        style = argparse.RawDescriptionHelpFormatter
        one = verbs.add_parser(name, help=about.splitlines()[0], description=about, formatter_class=style)
        verb.add_arguments(one)
        # Without a default of its own, which would undo one that comes before the verb.
        one.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON in place of tables"
        )
        one.set_defaults(run=verb.run, parser=one)
    return parser


def _tell_versions(*, as_json: bool) -> None:
    found = versions()
    if as_json:
        write_json(found)
        return
    for name, version in found.items():
        sys.stdout.write(f"{'tiered-mem' if name == 'tiered_mem' else name} {version or '-'}\n")


@contextlib.contextmanager
def _files_removed_at_the_end() -> Iterator[None]:
    """Inside, a signal that ends the process raises SystemExit, so that nothing stays behind."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
