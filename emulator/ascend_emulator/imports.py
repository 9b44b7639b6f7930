"""Completes torch_npu as it is imported: the kernel library before it, the CPU fallback after it."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from ascend_emulator.libraries import kernels_library, watch_library
from ascend_emulator.options import Options
from ascend_emulator.races import name_places
from ascend_emulator.runtime import runtime

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class TorchNpuFinder(MetaPathFinder):
    """Finds torch_npu where Python would, and lends it a loader that does the extra steps."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch_npu":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchNpuLoader(spec.loader)
        return spec


class _TorchNpuLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        _import_torch()
        # Linked with libtorch_cpu, which is there only now.
        ctypes.CDLL(str(kernels_library()), mode=ctypes.RTLD_GLOBAL)
        with contextlib.redirect_stdout(sys.stderr):  # torch_npu prints a warning; stdout is the script's
            self._loader.exec_module(module)
        # These import torch, which start() must precede.
        from ascend_emulator.dry import DryRun
        from ascend_emulator.fallback import install

        options = Options.inherited(os.environ)
        install(DryRun(options.dry_value, options.dry_routing == "uniform") if options.dry else None)
        _keep_aclnn(module._C)
        if options.host_operators:
            ctypes.CDLL(str(watch_library())).ascend_emulator_watch_operators()
        if runtime().ascend_emulator_watches_races():
            self._watch(module)

    def _watch(self, module: ModuleType) -> None:
        """Shows the race detector what the runtime does not see: torch's allocator, and CPU operators."""
        watch = ctypes.CDLL(str(watch_library()))
        watch.ascend_emulator_watch_host_operators()
        module.npu._lazy_call(watch.ascend_emulator_watch_allocator)  # there is no allocator before
        name_places()


def _import_torch() -> None:
    """As its own last act it imports torch_npu, which must not happen where a script begins with that."""
    if "torch" in sys.modules:
        return
    before = os.environ.get(_AUTOLOAD)
    os.environ[_AUTOLOAD] = "0"
    try:
        import_module("torch")
    finally:
        os.environ.pop(_AUTOLOAD)
        if before is not None:
            os.environ[_AUTOLOAD] = before


def _keep_aclnn(native: Any) -> None:
    """jit_compile=True sends operators to aclop, which compiles kernels as only CANN can; both compute the same."""
    set_option: Callable[[dict[str, str]], None] = native._npu_setOption

    def set_and_stay(option: dict[str, str]) -> None:
        set_option(option)
        if "jitCompile" in option:
            # Says what operators do when they are called, and leaves is_jit_compile_false() as the program has it.
            set_option({"jitCompileInit": "disable"})

    native._npu_setOption = set_and_stay
