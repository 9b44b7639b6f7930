"""What is left to do when the process ends."""

import atexit
import os
import sys
from pathlib import Path

from ascend_emulator.options import Options
from ascend_emulator.races import races
from ascend_emulator.timeline import write_trace


def finish_at_exit(options: Options, child: bool) -> None:
    """Writes the timeline when the process ends. A child also prints its races, which the parent does not see."""
    atexit.unregister(_finish)  # of an earlier start
    atexit.register(_finish, options, child, os.getpid())


def _finish(options: Options, child: bool, pid: int) -> None:
    if os.getpid() != pid:  # forked off; the device is not its
        return
    if options.timeline is not None:
        _write_timeline(_own(options.timeline) if child else options.timeline)
    if options.races and child:
        for race in races():
            print(race, file=sys.stderr)


def _own(path: Path) -> Path:
    """trace.json becomes trace.1234.json in process 1234."""
    return path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")


def _write_timeline(path: Path) -> None:
    try:
        write_trace(path)
    except OSError as error:
        print(f"ascend_emulator: the timeline cannot be written: {error}", file=sys.stderr)
