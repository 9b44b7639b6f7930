"""The blocks that exist, and those of which a policy has not heard yet."""

from __future__ import annotations

import itertools

import torch

from ..device import Device
from .block import Block, Span, View, span_of, view_of


class SavedBlocks:
    """All blocks that a saved tensor still needs. One thread at a time.

    by_key: all of them. by_span: those whose device bytes can be saved once more.
    saved, saved_bytes: key and size of the blocks that were saved since they were last taken, and the sum.
    ended, ended_bytes: of those that nobody needs any more.
    """

    def __init__(self, device: Device) -> None:
        self._current_stream = device.current_stream
        self._keys = itertools.count()
        self.by_key: dict[int, Block] = {}
        self.by_span: dict[Span, Block] = {}
        # None for a block that is gone by now.
        self.find = self.by_key.get
        self.saved: list[tuple[int, int]] = []
        self.saved_bytes = 0
        self.ended: list[int] = []
        self.ended_bytes = 0

    def save(self, tensor: torch.Tensor) -> tuple[Block, View]:
        """The block of the tensor's storage, held once more, and how the tensor lies in it.

        It is a new block if none holds the same contents.
        """
        span = span_of(tensor)
        version = tensor._version
        detached = tensor.detach()
        block = self.by_span.get(span)
        if block is None or block.versions[-1][1] != version or not block.unchanged():
            block = Block(next(self._keys), span, detached, self._current_stream())
            self.by_key[block.key] = self.by_span[span] = block
        block.holders += 1
        block.versions.append((detached, version))
        self.saved.append((block.key, block.nbytes))
        self.saved_bytes += block.nbytes
        return block, view_of(tensor, span, len(block.versions) - 1)

    def take_saved(self) -> tuple[tuple[int, int], ...]:
        saved, self.saved, self.saved_bytes = tuple(self.saved), [], 0
        return saved

    def take_ended(self) -> tuple[int, ...]:
        ended, self.ended, self.ended_bytes = tuple(self.ended), [], 0
        return ended
