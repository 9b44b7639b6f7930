"""What accelerator this machine really has, found without importing torch."""

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

_LIBRARY = "libascendcl.so"


def real_cann() -> Path | None:
    """The machine's own libascendcl.so, or None."""
    return next((path / _LIBRARY for path in _library_folders() if (path / _LIBRARY).exists()), None)


def _library_folders() -> Iterator[Path]:
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        if home := os.environ.get(variable):
            yield from (Path(home) / "lib64", Path(home) / "runtime" / "lib64")
    yield from (Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder)
    yield Path("/usr/local/Ascend/ascend-toolkit/latest/lib64")


def usable_cuda() -> bool:
    """Whether the installed torch is a CUDA build and the driver shows at least one GPU."""
    return _torch_is_built_for_cuda() and _cuda_devices() > 0


def _torch_is_built_for_cuda() -> bool:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists()


def _cuda_devices() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
