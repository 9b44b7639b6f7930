"""A lower tier without files: the memory of another machine, at the end of a slow wire."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace

from tests.spill.declared_files import host_access
from tiered_mem.errors import Closed, TierFull
from tiered_mem.spill.lower_tier import Piece, TierStats, Watcher


class RemoteTier:
    """Records as bytes of their own, and one message for each write and each read.

    A message arrives when somebody waits for it, or has asked `looks` times whether it has. Those before it arrive
    first, and nothing moves before that: what happens follows from the order of the calls alone.

    broken: how many messages of a kind do not arrive.
    """

    def __init__(self, capacity: int, *, looks: int = 3) -> None:
        self.looks = looks
        self._lock = threading.RLock()
        self._wire: deque[Message] = deque()
        self._stats = TierStats(capacity)
        self._watchers: list[Watcher] = []
        self._seconds, self._closed = 0.0, False
        self.broken = Counter[str]()

    def accepts(self, nbytes: int) -> bool:
        return not self._closed and self._stats.used + nbytes <= self._stats.capacity

    def write(self, pieces: Sequence[Piece], *, step: int, kind: str) -> RemoteRecord:
        with self._lock:
            self._check_open()
            nbytes = sum(piece.nbytes for piece in pieces)
            used, limit = self._stats.used, self._stats.capacity
            if not self.accepts(nbytes):
                raise TierFull("remote", needed=nbytes, free=limit - used, used=used, limit=limit, advice="wait")
            record = RemoteRecord([piece.nbytes for piece in pieces])
            record.job = self._send("write", nbytes, lambda: record.fill(pieces))
            self._count(1, nbytes)
            return record

    def read(self, record: RemoteRecord, wanted: Sequence[tuple[int, int]]) -> Message:
        with self._lock:
            self._check_open()
            nbytes = sum(record.sizes[index] for index, _ in wanted)
            return self._send("read", nbytes, lambda: record.copy_to(wanted))

    def release(self, record: RemoteRecord) -> None:
        with self._lock:
            if record.released or self._closed:
                return
            record.released = True
            self._count(-1, -sum(record.sizes))
            if record.job in list(self._wire)[1:]:  # the first is on its way
                self._wire.remove(record.job)
                record.job.end(CancelledError("it was given up before it was sent"))

    def stats(self) -> TierStats:
        return replace(self._stats)

    def watch(self, watcher: Watcher) -> None:
        self._watchers.append(watcher)

    def now(self) -> float:
        return self._seconds

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._wire:
                self.arrive()

    def arrive(self) -> None:
        """The first message arrives, or is lost."""
        with self._lock:
            message, began = self._wire[0], self._seconds
            self._seconds += 1e-3 + message.nbytes / 1e9
            broken = self.broken[message.kind] > 0
            self.broken[message.kind] -= broken
            self._stats.failures += broken
            if not broken:
                message.move()
                self._stats.written += message.nbytes * (message.kind == "write")
                self._stats.read += message.nbytes * (message.kind == "read")
            self._wire.popleft()
            message.end(ConnectionError("the wire is broken") if broken else None)
            for watcher in self._watchers:
                watcher(message.kind, message.nbytes, began, self._seconds)

    def _send(self, kind: str, nbytes: int, move: Callable[[], None]) -> Message:
        self._wire.append(Message(self, kind, nbytes, move))
        return self._wire[-1]

    def _count(self, records: int, nbytes: int) -> None:
        self._stats.records += records
        self._stats.used += nbytes

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the remote tier is closed")


class Message:
    """A write or a read: the job of the protocol."""

    def __init__(self, tier: RemoteTier, kind: str, nbytes: int, move: Callable[[], None]) -> None:
        self._tier, self._looks, self._ended = tier, tier.looks, False
        self.kind, self.nbytes, self.move = kind, nbytes, move
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        self._looks -= 1
        return self._ended or (self._looks < 0 and self.wait())

    def wait(self, seconds: float | None = None) -> bool:
        with self._tier._lock:
            while not self._ended:
                self._tier.arrive()
        return True

    def end(self, error: Exception | None) -> None:
        self.error, self._ended = error, True


class RemoteRecord:
    job: Message

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.released = False
        self._contents: list[bytes] = []

    def fill(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            with host_access(piece.ptr, piece.nbytes, write=False, what="send"):
                self._contents.append(ctypes.string_at(piece.ptr, piece.nbytes))

    def copy_to(self, wanted: Sequence[tuple[int, int]]) -> None:
        for index, ptr in wanted:
            with host_access(ptr, self.sizes[index], write=True, what="receive"):
                ctypes.memmove(ptr, self._contents[index], self.sizes[index])
