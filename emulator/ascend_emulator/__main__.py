"""python -m ascend_emulator [options] SCRIPT ARGS... : runs a script on the emulated NPU."""

import argparse
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType

from ascend_emulator.errors import EmulatorError
from ascend_emulator.hardware import real_cann, usable_cuda
from ascend_emulator.startup import start


def main() -> None:
    options = _parse(sys.argv[1:])
    if options.unless_hardware and (real_cann() or usable_cuda()):
        if real_cann() is None:  # torch_npu without CANN would make `import torch` fail
            os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        print("ascend_emulator: this machine has an accelerator, which is used as it is", file=sys.stderr)
    else:
        try:
            start(
                hbm_bytes=options.hbm,
                h2d_bytes_per_s=options.h2d,
                d2h_bytes_per_s=options.d2h,
                stack=options.stack,
                over_real_cann=options.over_real_cann,
            )
        except EmulatorError as error:
            sys.exit(f"ascend_emulator: {error}")
    script, *arguments = options.command
    if options.module:
        _run_module(script, arguments)
    else:
        _run_script(script, arguments)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ascend_emulator",
        usage="python -m ascend_emulator [OPTIONS] (SCRIPT | -m MODULE) [ARGS...]",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("--hbm", default="8GiB", metavar="SIZE", help="device memory (default: 8GiB)")
    parser.add_argument("--h2d", metavar="RATE", help='host to device, such as "4GB/s" (default: no limit)')
    parser.add_argument("--d2h", metavar="RATE", help='device to host, such as "4GB/s" (default: no limit)')
    parser.add_argument(
        "--stack",
        default="current",
        help="current (default), or old: torch_npu does not recognise host memory pinned by others",
    )
    parser.add_argument("--over-real-cann", action="store_true", help="start although a real CANN is present")
    parser.add_argument("--unless-hardware", action="store_true", help="use a real NPU or CUDA GPU if there is one")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
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
    vars(module)["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = module
    exec(compile(source, path, "exec"), vars(module))


if __name__ == "__main__":
    main()
