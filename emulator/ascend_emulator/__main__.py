"""python -m ascend_emulator [options] SCRIPT ARGS... : runs a script, module or code on the emulated NPU."""

import argparse
import importlib.machinery
import importlib.util
import linecache
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from ascend_emulator.errors import EmulatorError
from ascend_emulator.hardware import real_cann, usable_cuda
from ascend_emulator.races import Race, races
from ascend_emulator.startup import STARTED_BY, start

RACES_FOUND = 66


def main() -> None:
    options = _parse(sys.argv[1:])
    os.environ.pop(STARTED_BY, None)  # with options of its own this is no process's child
    if options.unless_hardware and (real_cann() or usable_cuda()):
        if real_cann() is None:  # torch_npu without CANN would make `import torch` fail
            os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        print("ascend_emulator: this machine has an accelerator, which is used as it is", file=sys.stderr)
        _run(options)
        return
    try:
        start(
            hbm_bytes=options.hbm,
            h2d_bytes_per_s=options.h2d,
            d2h_bytes_per_s=options.d2h,
            host_bytes=options.host,
            devices=options.devices,
            stack=options.stack,
            schedule=options.schedule,
            seed=options.seed,
            races=options.races,
            poison=not options.no_poison,
            faults=options.fault,
            timeline=options.timeline,
            clock=options.clock,
            server=options.server,
            host_memory_bytes_per_s=options.host_memory,
            host_operators=options.host_operators,
            dry=options.dry,
            dry_value=options.dry_value,
            dry_routing=options.dry_routing,
            over_real_cann=options.over_real_cann,
        )
    except EmulatorError as error:
        sys.exit(f"ascend_emulator: {error}")
    with _telling_races():
        _run(options)


def _run(options: argparse.Namespace) -> None:
    script, *arguments = options.command
    if options.module:
        _run_module(script, arguments)
    elif options.code:
        _run_code(script, arguments)
    else:
        _run_script(script, arguments)


@contextmanager
def _telling_races() -> Iterator[None]:
    """Prints the races that were found, if they are looked for. They make a script fail that has not failed."""
    succeeded = True
    try:
        yield
    except SystemExit as ending:
        succeeded = ending.code in (None, 0)
        raise
    except BaseException:
        succeeded = False
        raise
    finally:
        found = _found_races()
        for race in found:
            print(race, file=sys.stderr)
        if found and succeeded:
            sys.exit(RACES_FOUND)


def _found_races() -> list[Race]:
    try:
        return races()
    except EmulatorError:  # nobody looks for them
        return []


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ascend_emulator",
        usage="python -m ascend_emulator [OPTIONS] (SCRIPT | -m MODULE | -c CODE) [ARGS...]",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("--hbm", default="8GiB", metavar="SIZE", help="device memory (default: 8GiB)")
    parser.add_argument("--h2d", metavar="RATE", help='host to device, such as "4GB/s" (default: no limit)')
    parser.add_argument("--d2h", metavar="RATE", help='device to host, such as "4GB/s" (default: no limit)')
    parser.add_argument("--host", metavar="SIZE", help="most host memory to pin (default: no limit)")
    parser.add_argument("--devices", default=1, metavar="N", help="number of devices, 1 to 16 (default: 1)")
    parser.add_argument("--schedule", help="eager (default), late or random: when queued work runs")
    parser.add_argument("--seed", metavar="N", help="of the random schedule (default: 0)")
    parser.add_argument(
        "--races",
        action="store_true",
        default=None,
        help=f"print unordered uses of the same memory at the end, and exit with {RACES_FOUND} if there are any",
    )
    parser.add_argument("--no-poison", action="store_true", help="do not fill new and freed memory with a pattern")
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="SPEC",
        help="what fails: aclrtMalloc:3, aclrtMalloc:p=0.01,seed=7, device:100 (may be given several times)",
    )
    parser.add_argument("--timeline", metavar="FILE", help="write a Chrome trace there at the end")
    parser.add_argument("--clock", metavar="CHIP", help="model time by this chip, a name or FILE.toml")
    parser.add_argument(
        "--server", metavar="SERVER", help="whose host link that chip is behind, a name or FILE.toml"
    )
    parser.add_argument(
        "--host-memory", metavar="RATE", help="what that server's memory gives the copies of all ranks together"
    )
    parser.add_argument(
        "--host-operators", action="store_true", help="count what each operator of torch costs the modelled host"
    )
    parser.add_argument(
        "--dry", action="store_true", default=None, help="compute nothing: only count memory, and model time"
    )
    parser.add_argument("--dry-value", metavar="X", help="what the host reads of the device then (default: 0)")
    parser.add_argument("--dry-routing", metavar="HOW", help="of tokens to experts: refused (default) or uniform")
    parser.add_argument(
        "--stack",
        default="current",
        help="current (default), or old: torch_npu does not recognise host memory pinned by others",
    )
    parser.add_argument("--over-real-cann", action="store_true", help="start although a real CANN is present")
    parser.add_argument("--unless-hardware", action="store_true", help="use a real NPU or CUDA GPU if there is one")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    what.add_argument("-c", dest="code", action="store_true", help="SCRIPT is the program itself")
    parser.add_argument(
        "command", metavar="SCRIPT", nargs=argparse.REMAINDER, help="what to run, and its arguments"
    )
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("SCRIPT is missing")
    return options


def _run_module(name: str, arguments: list[str]) -> None:
    """Does what `python -m NAME ARGS...` would."""
    sys.argv = [name, *arguments]
    sys.path[0] = os.getcwd()
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the package it would be in
        found = None
    if found is None:
        sys.exit(f"ascend_emulator: no module named {name!r}")
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_script(script: str, arguments: list[str]) -> None:
    """Gives the script the sys.argv, sys.path and __main__ that `python SCRIPT ARGS...` would."""
    path = os.path.join(os.getcwd(), script)
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        sys.exit(f"ascend_emulator: can't open {script!r}: {error.strerror}")
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    _run_as_main(module, source, path)


def _run_code(code: str, arguments: list[str]) -> None:
    """Does what `python -c CODE ARGS...` would."""
    sys.argv = ["-c", *arguments]
    sys.path[0] = ""
    module = ModuleType("__main__")
    module.__loader__ = importlib.machinery.BuiltinImporter
    if sys.version_info >= (3, 13):  # its tracebacks show the code's lines
        linecache.cache["<string>"] = (len(code), None, code.splitlines(keepends=True), "<string>")
    _run_as_main(module, code, "<string>")


def _run_as_main(module: ModuleType, source: str | bytes, name: str) -> None:
    vars(module)["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = module
    exec(compile(source, name, "exec"), vars(module))


if __name__ == "__main__":
    main()
