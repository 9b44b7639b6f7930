"""Starts the emulated device in this process."""

import ctypes
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from ascend_emulator.errors import EmulatorError
from ascend_emulator.hardware import real_cann
from ascend_emulator.imports import TorchNpuFinder
from ascend_emulator.sizes import parse_bytes, parse_rate

LIBRARIES = Path(__file__).parent / "lib"
KERNELS = LIBRARIES / "libopapi.so"
KNOWN_TORCH_NPU = ("2.13.0",)


def start(
    *,
    hbm_bytes: int | str = "8GiB",
    h2d_bytes_per_s: int | str | None = None,
    d2h_bytes_per_s: int | str | None = None,
    stack: Literal["current", "old"] = "current",
    over_real_cann: bool = False,
) -> None:
    """Makes `import torch` find an emulated NPU. Call it before torch is imported, once in a process.

    hbm_bytes: capacity of the device's memory, in bytes or as "2GiB".
    h2d_bytes_per_s, d2h_bytes_per_s: bandwidth of each direction of the host link, in bytes per second or as
        "4GB/s"; None copies as fast as memcpy goes.
    stack: "old" reports a driver and CANN with which torch_npu does not recognise host memory that others
        pinned; "current" one with which it does (driver 25.5, CANN 8.5 and newer).
    over_real_cann: start even though the machine has a CANN of its own.

    Raises EmulatorError where that is not possible.
    """
    if "torch" in sys.modules:
        raise EmulatorError("torch is imported already; call ascend_emulator.start() before `import torch`")
    if stack not in ("current", "old"):
        raise EmulatorError(f"unknown stack {stack!r}; known are 'current' and 'old'")
    # Every variable is written, for those of a parent process may be there.
    environment = {
        "HBM_BYTES": str(parse_bytes(hbm_bytes)),
        "H2D_BYTES_PER_S": str(parse_rate(h2d_bytes_per_s or 0)),
        "D2H_BYTES_PER_S": str(parse_rate(d2h_bytes_per_s or 0)),
        "STACK": stack,
    }
    if not over_real_cann and (cann := real_cann()):
        raise EmulatorError(
            f"this machine has a real CANN ({cann}); run the script without the emulator, or force it with "
            "--over-real-cann (over_real_cann=True)"
        )
    _check_torch_npu()
    for name, value in environment.items():
        os.environ[f"ASCEND_EMULATOR_{name}"] = value
    _load_runtime()
    sys.meta_path.insert(0, TorchNpuFinder(KERNELS))


def configure(
    *,
    hbm_bytes: int | str | None = None,
    h2d_bytes_per_s: int | str | None = None,
    d2h_bytes_per_s: int | str | None = None,
) -> None:
    """Changes the device while it runs; None leaves a value as it is, and a rate of 0 takes the limit off.

    Memory that torch has already taken stays taken, and a copy that has begun keeps its rate.
    """
    runtime = ctypes.CDLL(str(LIBRARIES / "libascendcl.so"))
    if hbm_bytes is not None:
        runtime.ascend_emulator_set_hbm_bytes(ctypes.c_size_t(parse_bytes(hbm_bytes)))
    if h2d_bytes_per_s is not None:
        runtime.ascend_emulator_set_h2d(ctypes.c_double(parse_rate(h2d_bytes_per_s)))
    if d2h_bytes_per_s is not None:
        runtime.ascend_emulator_set_d2h(ctypes.c_double(parse_rate(d2h_bytes_per_s)))


def _check_torch_npu() -> None:
    try:
        installed = version("torch_npu")
    except PackageNotFoundError:
        raise EmulatorError("torch_npu is not installed; pip install 'torch_npu==2.13.*'") from None
    if installed.split("+")[0] not in KNOWN_TORCH_NPU:
        raise EmulatorError(
            f"torch_npu {installed} is not a version that this emulator knows ({', '.join(KNOWN_TORCH_NPU)}); "
            "pip install 'torch_npu==2.13.*'"
        )


def _load_runtime() -> None:
    """Loads every library by its full path: torch_npu, which asks by bare name, is then given these."""
    names = ("ascendcl", "hccl", "ge_runner", "graph", "acl_tdt_channel", "acl_op_compiler")
    runtime = [LIBRARIES / f"lib{name}.so" for name in names]
    for path in (*runtime, KERNELS):
        if not path.exists():
            raise EmulatorError(f"{path} is not built; run `make -C {LIBRARIES.parent.parent}`")
    for path in runtime:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
