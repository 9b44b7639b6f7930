"""libascendcl by ctypes, as code below torch calls it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
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


class Location(ctypes.Structure):
    """aclrtMemLocation."""

    _fields_ = (("device", ctypes.c_uint32), ("kind", ctypes.c_int))


class BatchAttributes(ctypes.Structure):
    """aclrtMemcpyBatchAttr."""

    _fields_ = (("destination", Location), ("source", Location), ("reserved", ctypes.c_uint8 * 16))


TO_DEVICE = BatchAttributes(Location(0, DEVICE), Location(0, PINNED))
TO_HOST = BatchAttributes(Location(0, PINNED), Location(0, DEVICE))


class Batch:
    """The arguments of aclrtMemcpyBatch for pairs of (destination, source, nbytes).

    attributes[k] is that of the pairs from first[k] on.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[int, int, int]],
        attributes: Sequence[BatchAttributes] = (TO_DEVICE,),
        first: Sequence[int] = (0,),
    ) -> None:
        def array(values: Sequence[int]) -> ctypes.Array[ctypes.c_size_t]:
            return (ctypes.c_size_t * len(values))(*values)

        destinations, sources, sizes = (array([pair[i] for pair in pairs]) for i in range(3))
        self.room = array(list(sizes))
        self._failed = ctypes.c_size_t(0)
        attribute_array = (BatchAttributes * len(attributes))(*attributes)
        self.arguments = (
            *(destinations, self.room, sources, sizes, len(pairs)),
            *(attribute_array, array(first), len(attributes), ctypes.byref(self._failed)),
        )

    @property
    def failed(self) -> int | None:
        """The pair that failed; None where the call says that none did."""
        return None if self._failed.value == 2**64 - 1 else self._failed.value


class Acl:
    """Pointers and handles are ints here; each is passed as 64 bits, which C takes for a narrower one too."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libascendcl.so")
        self._library.aclGetRecentErrMsg.restype = ctypes.c_char_p

    def call(self, function: str, *arguments: object) -> int:
        """Returns the ACL code."""
        passed = [ctypes.c_size_t(each) if isinstance(each, int) else each for each in arguments]
        code: int = getattr(self._library, function)(*passed)
        return code

    def check(self, function: str, *arguments: object) -> None:
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
