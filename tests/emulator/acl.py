"""libascendcl by ctypes, as code below torch calls it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

H2D, D2H, D2D = 1, 2, 3  # aclrtMemcpyKind
DEVICE, PINNED, PAGEABLE = 1, 0, 2  # aclrtMemLocationType


class Attributes(ctypes.Structure):
    """aclrtPtrAttributes."""

    _fields_ = (
        ("device", ctypes.c_uint32),
        ("kind", ctypes.c_int),
        ("page_bytes", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 4),
    )


class Acl:
    """Pointers and handles are ints here; each is passed as 64 bits, which C takes for a narrower one too."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libascendcl.so")
        self._library.aclGetRecentErrMsg.restype = ctypes.c_char_p

    def call(self, function: str, *arguments: int | ctypes._CArgObject) -> int:
        """Returns the ACL code."""
        passed = [ctypes.c_size_t(each) if isinstance(each, int) else each for each in arguments]
        code: int = getattr(self._library, function)(*passed)
        return code

    def check(self, function: str, *arguments: int | ctypes._CArgObject) -> None:
        code = self.call(function, *arguments)
        assert code == 0, f"{function}: {code}, {self.message()}"

    def message(self) -> str:
        text: bytes = self._library.aclGetRecentErrMsg()
        return text.decode()

    def made(self, function: str, *arguments: int) -> int:
        """Calls a function whose first argument is where to put what it makes, and returns that."""
        result = ctypes.c_size_t()
        self.check(function, ctypes.byref(result), *arguments)
        return result.value

    def malloc(self, nbytes: int) -> int:
        return self.made("aclrtMalloc", nbytes, 0)

    def malloc_host(self, nbytes: int) -> int:
        return self.made("aclrtMallocHost", nbytes)

    def copy(self, kind: int, destination: int, source: int, nbytes: int, stream: int) -> None:
        self.check("aclrtMemcpyAsync", destination, nbytes, source, nbytes, kind, stream)

    def kind_of(self, pointer: int) -> int:
        attributes = Attributes()
        self.check("aclrtPointerGetAttributes", pointer, ctypes.byref(attributes))
        kind: int = attributes.kind
        return kind

    @contextmanager
    def buffers(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Device memory and pinned host memory of that size, both zero."""
        device, host = self.malloc(nbytes), self.malloc_host(nbytes)
        try:
            yield device, host
        finally:
            self.check("aclrtFree", device)
            self.check("aclrtFreeHost", host)

    @contextmanager
    def streams(self, count: int) -> Iterator[list[int]]:
        made = [self.made("aclrtCreateStream") for _ in range(count)]
        try:
            yield made
        finally:
            for stream in made:
                self.check("aclrtDestroyStream", stream)

    @contextmanager
    def event(self) -> Iterator[int]:
        made = self.made("aclrtCreateEvent")
        try:
            yield made
        finally:
            self.check("aclrtDestroyEvent", made)


def byte_at(pointer: int) -> int:
    return ctypes.c_uint8.from_address(pointer).value


def fill(pointer: int, value: int, nbytes: int) -> None:
    ctypes.memset(pointer, value, nbytes)
