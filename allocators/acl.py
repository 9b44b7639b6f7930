"""Pinned memory from Ascend's runtime, and the registration there of memory that is not its own."""

from __future__ import annotations

import ctypes

from .acl_runtime import AclRuntime
from .runtime import PinnedByRuntime


class AclPinnedMemory(PinnedByRuntime):
    """A `HostMemory` of pinned memory, one `aclrtMallocHost` for each region.

    Pinning is slow and takes the RAM at once, so put a pool on top. The runtime must have been
    initialised and a device set on the calling thread, as `torch.npu.set_device(...)` does. Where the
    runtime fails for another reason than memory, allocate and deallocate raise AclError.

    `library` is the name or path of Ascend's runtime; a name also finds a library that is loaded already.
    Raises OSError if there is no such library, or if it lacks a function.
    """

    def __init__(self, library: str = "libascendcl.so") -> None:
        super().__init__(AclRuntime(library), "aclrtMallocHost", "aclrtFreeHost")


class AclRegistrar:
    """A `Registrar` that makes memory known to Ascend's runtime as pinned and mapped.

    The runtime must be ready as for `AclPinnedMemory`. It takes memory that is not its own on Linux
    newer than 5.10 only. Before aclrtHostRegisterV2 it knew no pinned memory but its own: there the
    memory is mapped for the device, and copies are those of pageable memory.

    `library` is as for `AclPinnedMemory`. Raises OSError if there is no such library, or if it cannot
    register.
    """

    PINNED = 0x2 | 0x10000000  # ACL_HOST_REG_MAPPED and ACL_HOST_REG_PINNED, the flags for aclrtHostRegisterV2
    _MAPPED = 0  # ACL_HOST_REGISTER_MAPPED, the type for aclrtHostRegister

    def __init__(self, library: str = "libascendcl.so") -> None:
        self._runtime = AclRuntime(library)
        range_of_bytes = (ctypes.c_void_p, ctypes.c_uint64)
        self._register_v2 = self._runtime.optional("aclrtHostRegisterV2", *range_of_bytes, ctypes.c_uint32)
        self._register = self._runtime.function(
            "aclrtHostRegister", *range_of_bytes, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p)
        )
        self._unregister = self._runtime.function("aclrtHostUnregister", ctypes.c_void_p)

    def register(self, ptr: int, nbytes: int) -> None:
        """Raises OutOfHostMemory, or AclError where the runtime fails for another reason."""
        if self._register_v2 is not None:
            name = "aclrtHostRegisterV2"
            code = self._register_v2(ptr, nbytes, self.PINNED)
        else:
            name = "aclrtHostRegister"
            code = self._register(ptr, nbytes, self._MAPPED, ctypes.byref(ctypes.c_void_p()))
        if code != 0:
            raise self._runtime.error(name, code, nbytes).or_out_of_memory()

    def unregister(self, ptr: int) -> None:
        """Raises AclError."""
        code = self._unregister(ptr)
        if code != 0:
            raise self._runtime.error("aclrtHostUnregister", code)
