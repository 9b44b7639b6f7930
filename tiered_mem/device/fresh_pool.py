"""Has torch's pool begin a step with memory in one piece, where what it has cached may not serve that step."""

from __future__ import annotations

from .device import Device, Pool

# So much more or less at the beginning of a step, of what torch has, makes another step of it.
_ALIKE = 0.01


class FreshPool:
    """Gives what torch's pool has cached back to the device, before steps that may want it cut otherwise.

    The pool keeps what tensors leave in pieces as they were. After a step with other tensors many do not fit, and
    new memory is taken beside them. Where there is none, torch gives pieces back too, but only those of which
    nothing is in use: in the middle of a step too few, with gigabytes free in all. Between two steps most are.

    To take all anew may cost some tenths of a second. So it is done after a step in which torch had to give pieces
    back. And where the device could not give a step once more what is cached, it is done before one that may not be
    as the last one was: either of them is recorded, or more or less rests on the device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._resting, self._retries, self._recorded = 0, 0, False

    def step_begins(self, *, recorded: bool) -> None:
        """recorded: nobody knows yet what the step will take."""
        pool = self._device.pool()
        moved = abs(pool.allocated - self._resting) > _ALIKE * pool.reserved
        another = recorded or self._recorded or moved
        if pool.retries > self._retries or (another and self._has_most(pool)):
            self._device.empty_cache()
        self._resting, self._retries, self._recorded = pool.allocated, pool.retries, recorded

    def _has_most(self, pool: Pool) -> bool:
        """Whether the device has less beside it than is cached."""
        usable, _ = self._device.usable_and_total()
        return pool.reserved - pool.allocated > usable - pool.reserved
