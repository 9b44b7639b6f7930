"""Ranks without torch: processes that are forked before the device is used, and call HCCL by ctypes.

To be used in a script that the emulator's launcher runs. Device memory is memory of the host here, so that it can
be filled and read as it is.
"""

from __future__ import annotations

import ctypes
import json
import os
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from emulator.tests.acl import Acl

INT8, INT32, FP16, FP32, INT64, BF16 = 0, 2, 3, 4, 5, 11  # HcclDataType
SUM, PRODUCT, MAXIMUM, MINIMUM = 0, 1, 2, 3  # HcclReduceOp
SEND, RECEIVE = 0, 1  # HcclSendRecvType
ROOT_BYTES = 4108

Program = Callable[["Rank"], Any]


class Item(ctypes.Structure):
    """HcclSendRecvItem."""

    _fields_ = (
        ("what", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("dtype", ctypes.c_int),
        ("peer", ctypes.c_uint32),
    )


class Rank:
    """One rank of a job, on the device of its number, with a stream."""

    def __init__(self, number: int, mailboxes: list[tuple[int, int]]) -> None:
        self.number = number
        self.ranks = len(mailboxes)
        self._mailboxes = mailboxes
        self.acl = Acl()
        self.hccl = ctypes.CDLL("libhccl.so")
        self.acl.check("aclrtSetDevice", number)
        self.stream = self.acl.made("aclrtCreateStream")

    def root(self, members: Sequence[int]) -> ctypes.Array[ctypes.c_char]:
        """What the first of the members has to tell the others."""
        root = ctypes.create_string_buffer(ROOT_BYTES)
        if self.number == members[0]:
            assert self.call("HcclGetRootInfo", root) == 0, self.acl.message()
            for other in members[1:]:
                os.write(self._mailboxes[other][1], root.raw)
        else:
            root.raw = os.read(self._mailboxes[self.number][0], ROOT_BYTES)
        return root

    def communicator(self, members: Sequence[int] | None = None) -> int:
        """A new one of all ranks, or of these."""
        chosen = range(self.ranks) if members is None else members
        handle = ctypes.c_size_t()
        place = chosen.index(self.number)
        code = self.call("HcclCommInitRootInfo", len(chosen), self.root(chosen), place, ctypes.byref(handle))
        assert code == 0, self.acl.message()
        return handle.value

    def call(self, function: str, *arguments: object) -> int:
        """Returns the code of HCCL."""
        passed = [ctypes.c_size_t(each) if isinstance(each, int) else each for each in arguments]
        code: int = getattr(self.hccl, function)(*passed)
        return code

    def put(self, function: str, *arguments: object, stream: int | None = None) -> None:
        """Calls a function that ends with a stream: this rank's, unless another one is given."""
        code = self.call(function, *arguments, self.stream if stream is None else stream)
        assert code == 0, f"{function}: {code}, {self.acl.message()}"

    def floats(self, values: Sequence[float]) -> int:
        """Device memory that holds them."""
        pointer = self.acl.malloc(max(4 * len(values), 64))
        raw = array("f", values).tobytes()
        ctypes.memmove(pointer, raw, len(raw))
        return pointer

    def join(self, stream: int | None = None) -> None:
        self.acl.check("aclrtSynchronizeStream", self.stream if stream is None else stream)

    def error(self) -> str:
        """The stream's, once it is done; empty if there is none."""
        return self.acl.message() if self.acl.call("aclrtSynchronizeStream", self.stream) else ""


def mine(rank: Rank, count: int = 4) -> list[float]:
    """Small whole numbers, other ones on each rank."""
    return [10.0 * rank.number + i for i in range(count)]


def floats_at(pointer: int, count: int) -> list[float]:
    return list(array("f", ctypes.string_at(pointer, 4 * count)))


def together(ranks: int, program: Program, **environment: str) -> list[Any]:
    """What the program returned on each rank; or its exit status, negative for a signal, if it returned nothing."""
    mailboxes = [os.pipe() for _ in range(ranks)]
    results = [os.pipe() for _ in range(ranks)]
    children = []
    for number in range(ranks):
        if (child := os.fork()) == 0:
            os.environ.update(environment)
            try:
                said = program(Rank(number, mailboxes))
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(results[number][1], json.dumps(said).encode())
            os._exit(0)
        children.append(child)
    said = []
    for number, child in enumerate(children):
        os.close(results[number][1])
        text = b"".join(iter(lambda end=results[number][0]: os.read(end, 1 << 16), b""))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.append(json.loads(text) if text else status)
        os.close(results[number][0])
    for ends in mailboxes:
        for end in ends:
            os.close(end)
    return said
