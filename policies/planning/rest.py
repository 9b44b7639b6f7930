"""A step that nothing has to leave: of its blocks and its memory no more is told than it takes to see that."""

from __future__ import annotations

from ..base import Event, Memory, Saved
from .recording import Recording


class Rest:
    """The part of a step in which the device has so much room that nothing has to move.

    It ends where more than `most` bytes are allocated, or would be with the blocks that were saved since that was
    last told.

    recording: of a step that this one repeats. allocated, reserved: the most of each that was told.
    """

    def __init__(self, recording: Recording, most: int, memory: Memory) -> None:
        self.recording = recording
        self._most = most
        self._device = memory.device
        self.allocated, self.reserved = memory.device, memory.reserved

    def goes_on(self, event: Event, memory: Memory | None) -> bool:
        """Whether it does after this event, of which it takes note then."""
        device = self._device if memory is None else memory.device
        if memory is None and isinstance(event, Saved):
            device += sum([nbytes for _, nbytes in event.blocks])
        if device > self._most:
            return False
        self._device = device
        if memory is not None:
            self.allocated = max(self.allocated, device)
            self.reserved = max(self.reserved, memory.reserved)
        return True
