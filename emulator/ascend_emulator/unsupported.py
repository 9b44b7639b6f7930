"""What torch_npu can be told to do and this device cannot, answered before torch_npu has changed its own state."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn


def install_refusals(torch_npu: ModuleType) -> None:
    """Refuses graphs as their capture begins, and keeps operators on the aclnn way in spite of jit_compile=True."""
    native = torch_npu._C
    native._NPUGraph.capture_begin = _refuse_capture
    native._npu_setOption = _with_aclnn(native._npu_setOption)


def _refuse_capture(*args: Any, **kwargs: Any) -> NoReturn:
    # torch_npu would route memory to the graph's own pool first, and go on to do so after the runtime's error.
    raise NotImplementedError("the emulated NPU captures no graphs")


def _with_aclnn(set_option: Callable[[dict[str, str]], None]) -> Callable[[dict[str, str]], None]:
    """jit_compile=True sends operators to aclop, which compiles kernels as only CANN can; both compute the same."""

    def set_and_stay(option: dict[str, str]) -> None:
        set_option(option)
        if "jitCompile" in option:
            # Says what operators do when they are called, and leaves is_jit_compile_false() as the program has it.
            set_option({"jitCompileInit": "disable"})

    return set_and_stay
