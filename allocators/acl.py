"""Ascend's runtime: its pinned memory, and the registration of memory that is not its own."""

from __future__ import annotations

import ctypes

from .runtime import PinnedByRuntime, Runtime, RuntimeFailure, RuntimeRegistrar

_THREAD_LEVEL = 0
_BUS_ID_BYTES = 32


class AclPinnedMemory(PinnedByRuntime):
    """A `HostMemory` of pinned memory, one `aclrtMallocHost` for each region.

    Pinning is slow and takes the RAM at once, so put a pool on top. The runtime must have been
    initialised and a device set on the calling thread, as `torch.npu.set_device(...)` does. Where the
    runtime fails for another reason than memory, allocate and deallocate raise AclError.

    Args:
        library: The name or path of Ascend's runtime; a name also finds a library that is loaded already.

    Raises:
        OSError: There is no such library, or it lacks a function.
    """

    def __init__(self, library: str = "libascendcl.so") -> None:
        super().__init__(AclRuntime(library), "aclrtMallocHost", "aclrtFreeHost")


class AclRegistrar(RuntimeRegistrar):
    """A `Registrar` that makes memory known to Ascend's runtime as pinned and mapped.

    The runtime must be ready as for `AclPinnedMemory`. It takes memory that is not its own on Linux
    newer than 5.10 only. Before aclrtHostRegisterV2 it knew no pinned memory but its own: there the
    memory is mapped for the device, and copies are those of pageable memory.

    `library` is as for `AclPinnedMemory`. Raises OSError if there is no such library, or if it cannot
    register. The runtime's error is AclError.
    """

    PINNED = 0x2 | 0x10000000  # ACL_HOST_REG_MAPPED and ACL_HOST_REG_PINNED, the flags for aclrtHostRegisterV2
    _MAPPED = 0  # ACL_HOST_REGISTER_MAPPED, the type for aclrtHostRegister

    def __init__(self, library: str = "libascendcl.so") -> None:
        runtime = AclRuntime(library)
        range_of_bytes = (ctypes.c_void_p, ctypes.c_uint64)
        ignored = ctypes.byref(ctypes.c_void_p())  # the device's address of the memory
        name, flags = "aclrtHostRegister", [self._MAPPED, ignored]
        runtime.function(name, *range_of_bytes, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
        if runtime.optional("aclrtHostRegisterV2", *range_of_bytes, ctypes.c_uint32):
            name, flags = "aclrtHostRegisterV2", [self.PINNED]
        runtime.function("aclrtHostUnregister", ctypes.c_void_p)
        super().__init__(runtime.library, runtime.error, name, "aclrtHostUnregister", *flags)


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


class AclRuntime(Runtime):
    """`library` is the name or path of Ascend's runtime; a name also finds a library that is loaded already.

    Raises OSError if there is no such library.
    """

    failure = AclError
    _not_the_one = "it is not Ascend's runtime. Pass the path of libascendcl.so"

    def __init__(self, library: str = "libascendcl.so") -> None:
        try:
            super().__init__(ctypes.CDLL(library))
        except OSError as error:
            raise OSError(
                f"cannot load Ascend's runtime {library!r}: {error}. Install CANN and source its set_env.sh, "
                "pass the path of the library, or use PageableMemory"
            ) from error
        self._message = self.optional("aclGetRecentErrMsg", result=ctypes.c_char_p)
        self._peek = self.optional("aclrtPeekAtLastError", ctypes.c_int)
        self._clear = self.optional("aclrtGetLastError", ctypes.c_int)
        self._bus_id = self.optional("aclrtDeviceGetPCIBusId", ctypes.c_int32, ctypes.c_char_p, ctypes.c_int32)

    def recall(self, function: str, nbytes: int) -> RuntimeFailure:
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
            self._take_words(code)
            return None
        return text.value.decode()

    def _take_words(self, code: int) -> str:
        # torch_npu puts the remembered code in place of that of a later failure, so a refused request
        # that we report ourselves must not stay behind. Any other code is not ours to clear.
        if self._peek and self._clear and self._peek(_THREAD_LEVEL) == code:
            self._clear(_THREAD_LEVEL)
        text: bytes | None = self._message() if self._message else None
        return (text or b"").decode(errors="replace").strip()
