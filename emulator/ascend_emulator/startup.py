"""Starts the emulated device in this process, hands it on to child processes, and reports when the process ends."""

import atexit
import ctypes
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Literal

from ascend_emulator.errors import EmulatorError
from ascend_emulator.faults import Fault, clear_faults, inject
from ascend_emulator.hardware import real_cann
from ascend_emulator.imports import TorchNpuFinder
from ascend_emulator.libraries import compile_missing, libraries_of_the_runtime
from ascend_emulator.options import Options, parse_bytes, parse_limit, parse_rate
from ascend_emulator.races import races as races_found
from ascend_emulator.runtime import runtime
from ascend_emulator.timeline import write_trace

# Of these all releases, with what is built or published after one.
KNOWN_TORCH_NPU = ("2.9", "2.10", "2.11", "2.12", "2.13", "2.14")
_ALLOCATOR = "torch_npu/include/torch_npu/csrc/core/npu/NPUCachingAllocator.h"
# A folder for PYTHONPATH.
CHILD = Path(__file__).parent / "child"
# The process whose options are in the environment. Without this variable a child is left alone.
STARTED_BY = "ASCEND_EMULATOR_STARTED_BY"


def start(
    *,
    hbm_bytes: int | str = "8GiB",
    h2d_bytes_per_s: int | str | None = None,
    d2h_bytes_per_s: int | str | None = None,
    host_bytes: int | str | None = None,
    devices: int = 1,
    stack: Literal["current", "old"] = "current",
    schedule: Literal["eager", "late", "random"] | None = None,
    seed: int | None = None,
    races: bool | None = None,
    poison: bool = True,
    faults: Sequence[Fault | str] = (),
    timeline: str | Path | None = None,
    clock: str | Path | None = None,
    server: str | Path | None = None,
    host_memory_bytes_per_s: int | str | None = None,
    host_operators: bool = False,
    dry: bool | None = None,
    dry_value: float | None = None,
    dry_routing: Literal["refused", "uniform"] | None = None,
    over_real_cann: bool = False,
) -> None:
    """Makes `import torch` find an emulated NPU, in this process and in its children. Call it before that import.

    hbm_bytes: capacity of each device's memory, in bytes or as "2GiB".
    h2d_bytes_per_s, d2h_bytes_per_s: bandwidth of each direction of the host link, in bytes per second or as
        "4GB/s"; None copies as fast as memcpy goes.
    host_bytes: the most host memory that can be pinned; None sets no limit.
    devices: how many there are, 1 to 16.
    stack: "old" reports a driver and CANN with which torch_npu does not recognise host memory that others
        pinned, and that lack aclrtMemcpyBatchAsync; "current" those with which it does (driver 25.5, CANN 8.5).
    schedule: "eager" runs what is queued as soon as it can, "late" when somebody waits for it, "random" in an order
        that is drawn from `seed`, an int of at least 0.
    races: whether unordered uses of the same memory are looked for.
    poison: whether new and freed memory is filled with a pattern.
    faults: what is to fail, as Fault or as its text.
    timeline: a file to write a Chrome trace to when the process ends.
    clock: model time by this chip, and take no time for copies: "910b2", "910b3" (or "910b"), "910b4", "910c",
        "a100", "h100", "h200", or a chip file, FILE.toml. None keeps this machine's time.
    server: whose host link the chip is behind, by name or as FILE.toml; None means the chip's usual one. The two
        rates above override its own.
    host_memory_bytes_per_s: what the modelled host's memory gives the copies of all ranks together, in both
        directions; None means what the server's file says.
    host_operators: whether each operator of torch costs the modelled host what the chip's file says, also one that
        launches nothing; else only calls of the runtime cost it something.
    dry: compute nothing and move no bytes: operations take their modelled time, and memory is only counted.
    dry_value: in a dry run, what item() and copies to the host's own memory give; 0 unless given.
    dry_routing: in a dry run, whether a mixture of experts that asks the device where its tokens go is refused, or
        told that each expert has as many as the others: "refused" (unless given) or "uniform".
    over_real_cann: start even though the machine has a CANN of its own.

    For schedule, seed, races, timeline, clock, server, dry, dry_value and dry_routing None means what the variables
    ASCEND_EMULATOR_SCHEDULE, _SEED, _RACES (1 or 0), _TIMELINE, _CLOCK, _SERVER, _DRY (1 or 0), _DRY_VALUE and
    _DRY_ROUTING say; without these "eager", 0, False, and no more.
    If start is called again before torch is imported, the last call counts.

    Raises EmulatorError, and changes nothing, where a value means nothing or the device cannot be started.
    """
    _begin(Options.of(locals(), os.environ))


def start_as_child() -> None:
    """Starts with the options of the parent process, unless this process has started with its own."""
    if not any(isinstance(finder, TorchNpuFinder) for finder in sys.meta_path):
        _begin(Options.inherited(os.environ))


def configure(
    *,
    hbm_bytes: int | str | None = None,
    h2d_bytes_per_s: int | str | None = None,
    d2h_bytes_per_s: int | str | None = None,
    host_bytes: int | str | None = None,
) -> None:
    """Changes the device while it runs; None leaves a value as it is, and a rate or host limit of 0 takes it off.

    Memory that torch has already taken stays taken, and a copy that has begun keeps its rate. Child processes have
    the values of start(). Raises EmulatorError for a value that means nothing, and without an emulated device.
    """
    library = runtime()
    if hbm_bytes is not None:
        library.ascend_emulator_set_hbm_bytes(ctypes.c_size_t(parse_bytes(hbm_bytes)))
    if h2d_bytes_per_s is not None:
        library.ascend_emulator_set_h2d(ctypes.c_double(parse_rate(h2d_bytes_per_s)))
    if d2h_bytes_per_s is not None:
        library.ascend_emulator_set_d2h(ctypes.c_double(parse_rate(d2h_bytes_per_s)))
    if host_bytes is not None:
        library.ascend_emulator_set_host_bytes(ctypes.c_size_t(parse_limit(host_bytes)))


def can_look_for_races() -> bool:
    """Whether the allocator of the torch_npu that is installed tells what it takes back.

    Its version does not say: 2.13 has it, and of 2.9 to 2.12 only the last releases, such as 2.12.0.post3.
    """
    header = Path(str(distribution("torch_npu").locate_file(_ALLOCATOR)))
    return header.exists() and "attachAllocatorTraceTracker" in header.read_text()


def _begin(options: Options) -> None:
    if "torch" in sys.modules:
        raise EmulatorError("torch is imported already; call ascend_emulator.start() before `import torch`")
    if not options.over_real_cann and (cann := real_cann()):
        raise EmulatorError(
            f"this machine has a real CANN ({cann}); run the script without the emulator, or force it with "
            "--over-real-cann (over_real_cann=True)"
        )
    _check_torch_npu(races=options.races)
    compile_missing()
    os.environ.update(options.environment())
    if options.races or options.schedule == "random" or options.devices > 1 or options.clock:
        # torch_npu then issues kernels on the thread that asked for them, and not on a thread for each device. So a
        # race has the right stack, a seed gives the same order again, modelled time has all calls in the program's
        # order, and no device is told to wait for another one's event before that is recorded, or after it is
        # destroyed.
        os.environ["TASK_QUEUE_ENABLE"] = "0"
    for path in libraries_of_the_runtime():
        # By its full path: torch_npu, which asks for it by its bare name, is then given this one.
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    clear_faults()
    for fault in options.faults:
        inject(fault)
    runtime().ascend_emulator_keep_timeline(int(options.timeline is not None))
    atexit.unregister(_finish)  # of an earlier start
    pid = os.getpid()
    is_child = os.environ.setdefault(STARTED_BY, str(pid)) != str(pid)
    atexit.register(_finish, options, is_child, pid)
    _hand_on_to_children()
    if not any(isinstance(finder, TorchNpuFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchNpuFinder())


def _check_torch_npu(*, races: bool) -> None:
    try:
        installed = version("torch_npu")
    except PackageNotFoundError:
        raise EmulatorError("torch_npu is not installed; pip install 'torch_npu==2.13.*'") from None
    release = re.match(r"(\d+\.\d+)\.\d+(\.post\d+)?(\+.*)?$", installed)
    if release is None or release[1] not in KNOWN_TORCH_NPU:
        raise EmulatorError(
            f"torch_npu {installed} is not a version that this emulator knows ({', '.join(KNOWN_TORCH_NPU)}); "
            "pip install 'torch_npu==2.13.*'"
        )
    if races and not can_look_for_races():
        raise EmulatorError(
            "the race detector needs an allocator that tells what it takes back, which that of torch_npu "
            f"{installed} does not; install 2.13 or a later release of this one, such as 2.12.0.post3, or leave "
            "races out"
        )


def _hand_on_to_children() -> None:
    """Makes Python run child/sitecustomize.py at the start of every process that this one starts."""
    path = os.environ.get("PYTHONPATH")
    folders = path.split(os.pathsep) if path else []
    others = [folder for folder in folders if folder != str(CHILD)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(CHILD), *others])


def _finish(options: Options, is_child: bool, pid: int) -> None:
    """Writes the timeline. A child also prints its races, which the parent does not see."""
    if os.getpid() != pid:  # forked off; the device is not its
        return
    if options.timeline is not None:
        _write_timeline(_own(options.timeline) if is_child else options.timeline)
    if options.races and is_child:
        for race in races_found():
            print(race, file=sys.stderr)


def _own(path: Path) -> Path:
    """trace.json becomes trace.1234.json in process 1234."""
    return path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")


def _write_timeline(path: Path) -> None:
    try:
        write_trace(path)
    except OSError as error:
        print(f"ascend_emulator: the timeline cannot be written: {error}", file=sys.stderr)
