"""Memory as the disk tier takes it."""

from __future__ import annotations

import ctypes
import mmap
import random

from tiered_mem.allocators.base import round_up
from tiered_mem.spill.lower_tier import Piece


class Memory:
    """Whole pages, from a page boundary on, that begin with `content`."""

    def __init__(self, content: bytes) -> None:
        self.nbytes = len(content)
        self._pages = mmap.mmap(-1, max(round_up(self.nbytes), 4096))
        self._pages[: self.nbytes] = content
        self.ptr = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))

    @property
    def content(self) -> bytes:
        return self._pages[: self.nbytes]

    def piece(self, name: str = "block", dtype: str = "uint8") -> Piece:
        return Piece(name, self.ptr, self.nbytes, dtype)


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def empty(nbytes: int) -> Memory:
    return Memory(bytes(nbytes))
