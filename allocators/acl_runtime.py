"""Ascend's runtime by ctypes: its functions and its errors."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

from .runtime import RuntimeFailure

_THREAD_LEVEL = 0
_BUS_ID_BYTES = 32


class AclError(RuntimeFailure):
    """A function of Ascend's runtime failed with `code`, for `nbytes` bytes where the size is known."""

    _kind_of_code = "ACL code"
    # ACL_ERROR_BAD_ALLOC, ACL_ERROR_RT_MEMORY_ALLOCATION and ACL_ERROR_RT_DEVICE_OOM; the last is what a
    # device without host memory of its own says.
    _out_of_memory = frozenset({200000, 207001, 207018})
    _advice = (
        "Look the code up in acl/error_codes/rt_error_codes.h; "
        "if it says that there is no context, call torch.npu.set_device on this thread first"
    )


class AclRuntime:
    """`library` is the name or path of Ascend's runtime; a name also finds a library that is loaded already.

    Raises OSError if there is no such library.
    """

    failure: ClassVar[type[RuntimeFailure]] = AclError

    def __init__(self, library: str = "libascendcl.so") -> None:
        try:
            self._runtime = ctypes.CDLL(library)
        except OSError as error:
            raise OSError(
                f"cannot load Ascend's runtime {library!r}: {error}. Install CANN and source its set_env.sh, "
                "pass the path of the library, or use PageableMemory"
            ) from error
        self._message = self.optional("aclGetRecentErrMsg", result=ctypes.c_char_p)
        self._peek = self.optional("aclrtPeekAtLastError", ctypes.c_int)
        self._clear = self.optional("aclrtGetLastError", ctypes.c_int)
        self._bus_id = self.optional("aclrtDeviceGetPCIBusId", ctypes.c_int32, ctypes.c_char_p, ctypes.c_int32)

    def function(self, name: str, *arguments: Any) -> Any:
        """A function with arguments of these types that returns an ACL code. Raises OSError if there is none."""
        function = self.optional(name, *arguments)
        if function is None:
            raise OSError(
                f"{self._runtime._name!r} has no function {name}: it is not Ascend's runtime. "
                "Pass the path of libascendcl.so, or use PageableMemory"
            )
        return function

    def optional(self, name: str, *arguments: Any, result: Any = ctypes.c_int) -> Any:
        """A function of these types, or None where this version of the runtime has none of that name."""
        function = getattr(self._runtime, name, None)
        if function is None:
            return None
        function.restype = result
        function.argtypes = arguments
        return function

    def error(self, function: str, code: int, nbytes: int | None = None) -> AclError:
        """The error for a function that returned `code` just now, on this thread. The runtime forgets it."""
        # torch_npu puts the remembered code in place of that of a later failure, so a refused request
        # that we report ourselves must not stay behind. Any other code is not ours to clear.
        if self._peek and self._clear and self._peek(_THREAD_LEVEL) == code:
            self._clear(_THREAD_LEVEL)
        text: bytes | None = self._message() if self._message else None
        return AclError(function, code, nbytes, (text or b"").decode(errors="replace").strip())

    def recall(self, function: str, nbytes: int) -> AclError:
        """As `error`, for a function whose caller did not hand on the code: the runtime remembers it."""
        code = self._peek(_THREAD_LEVEL) if self._peek else 0
        return self.error(function, code, nbytes)

    def pci_bus_id(self, device: int) -> str | None:
        """A device's address on the PCI bus, such as "0000:3d:00.0".

        None where the runtime is too old to tell, and for devices that are not on PCI.
        """
        if self._bus_id is None:
            return None
        text = ctypes.create_string_buffer(_BUS_ID_BYTES)
        code = self._bus_id(device, text, _BUS_ID_BYTES)
        if code != 0:
            self.error("aclrtDeviceGetPCIBusId", code)
            return None
        return text.value.decode()
