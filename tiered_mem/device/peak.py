"""The peak that torch tells of device memory: read between events, and true for whoever else reads it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from .device import Device

# torch_npu asks for so many bytes more than a tensor has, and both pools give whole pieces of 512.
_PADDING = 32
_GRAIN = 512
# What torch's pool for small tensors gives at most. The other one splits a piece if more than this is left of it.
_SMALL = 1 << 20


class DevicePeak:
    """Reads the most that was allocated since it was last read.

    torch has one peak, which only rises until somebody begins it anew. So a peak below an earlier one is not seen,
    but from `begin_anew` on, where it is torch's own that begins anew with each reading. `restore` gives it back
    the height that it would have.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._told = 0  # torch's peak as it was last read
        self._before = 0  # the most since then, where `restore` has hidden it
        self._true: int | None = None  # torch's peak, if it had not begun anew here; None while it has not
        self._begun_anew_from = 0  # the most from the reading before `begin_anew` to that, if it is known

    @property
    def exact(self) -> bool:
        """Whether all that came and went since the last reading is seen."""
        return self._true is not None

    def read(self) -> tuple[int, int, int, int]:
        """The bytes that are allocated, the most since the last reading, and `Device.memory()`'s third.

        With `begin_anew` since the last reading the second is the most since that. What it was before is the
        fourth, and 0 where it is not known.
        """
        allocated, peak, reserved = self._device.memory()
        # One that is lower than it was began anew meanwhile, by the user.
        seen = peak if self.exact or peak != self._told else allocated
        most = max(seen, self._before)
        begun_anew_from = self._begun_anew_from
        self._told, self._before, self._begun_anew_from = peak, 0, 0
        if self._true is not None:
            self._true = max(self._true, peak)
        return allocated, most, reserved, begun_anew_from

    def look(self) -> None:
        """The next reading has what is seen by now, also if the user begins the peak anew before."""
        _, peak, _ = self._device.memory()
        if self.exact or peak != self._told:
            self._before, self._told = max(self._before, peak), peak

    def begin_anew(self) -> None:
        """What is allocated now is the peak, until it rises or `restore` is called."""
        _, peak, _ = self._device.memory()
        if self.exact:
            self._begun_anew_from = max(self._begun_anew_from, peak)
        self._true = max(self._true or 0, peak)
        self._device.reset_peak()

    @contextlib.contextmanager
    def measured(self) -> Iterator[Callable[[], int]]:
        """Calls of what it gives tell the most that was allocated inside. Others see no difference."""
        if self.exact:
            self._before = max(self._before, self._device.memory()[1])
        self.begin_anew()
        most = 0

        def told() -> int:
            return most

        try:
            yield told
        finally:
            _, most, _ = self._device.memory()
            self.restore()

    def restore(self) -> None:
        """Has torch tell of the peak that it would have if it had not begun anew."""
        if self._true is None:
            return
        allocated, peak, _ = self._device.memory()
        self._before = max(self._before, peak)
        true, self._true = max(self._true, peak), None
        if true > peak:
            _fill(self._device, true - allocated)
        self._told = self._device.memory()[1]


def _fill(device: Device, nbytes: int) -> None:
    """Allocates so many bytes for a moment, of what torch's pool has free, so that it does not grow.

    Where the free pieces cannot be put together to as much, it is up to 1 MiB less.
    """
    large, small = device.free_pieces()
    held = []

    def take(most: int) -> int:
        piece = most // _GRAIN * _GRAIN
        if piece:
            held.append(device.empty(piece - _PADDING, torch.uint8))
        return piece

    try:
        while nbytes > _SMALL and (part := _part(large, nbytes)):
            nbytes -= take(part)
        for piece in small:
            while taken := take(min(piece, nbytes, _SMALL)):
                nbytes -= taken
                piece -= taken
    except torch.OutOfMemoryError:
        return  # another thread has taken a piece: the peak stays a little lower


def _part(pieces: list[int], nbytes: int) -> int:
    """What to allocate next of so many bytes. It is taken from the pieces; 0 where none of them can give any.

    torch's pool gives the smallest piece that is large enough, and all of it if little would be left.
    """
    larger = min((piece for piece in pieces if piece >= nbytes), default=0)
    smaller = max((piece for piece in pieces if _SMALL < piece < nbytes), default=0)
    if larger == nbytes:
        part = piece = larger
    elif larger > nbytes + _SMALL:
        part, piece = nbytes, larger
    elif smaller:
        part = piece = smaller
    else:
        part, piece = larger - _SMALL - _GRAIN, larger
    if part <= _SMALL:
        return 0
    pieces.remove(piece)
    if piece > part:
        pieces.append(piece - part)
    return part
