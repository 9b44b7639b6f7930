"""Has torch's pool begin a step with memory in one piece, where what it has cached may not serve that step."""

from __future__ import annotations

from .device import Device

# So much more or less at the beginning of a step, of what torch has, makes another step of it.
_ALIKE = 0.01
# Pieces between tensors took 6 to 10 % of the device where steps of Llama 2 7B are alike.
_ROOMY = 1 / 8


class FreshPool:
    """Gives what torch's pool has cached back to the device, before steps that may want it cut otherwise.

    The pool keeps what tensors leave in pieces as they were. After a step with other tensors many do not fit, and
    new memory is taken beside them. Where there is none, torch gives pieces back too, but only those of which
    nothing is in use: in the middle of a step too few, with gigabytes free in all. Between two steps most are.

    To take all anew may cost some tenths of a second. So it is done only before a step that may not be as the last
    one was, as either is recorded, or more or less rests on the device: if the device could not give once more what
    is cached. And after a step in which torch had to give pieces back, if tensors have most of the device: where
    they leave it an eighth, the pieces come to suit steps that are alike.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._resting = self._retries = 0
        self._recorded = False

    def step_begins(self, *, recorded: bool) -> None:
        """recorded: nobody knows yet what the step will take."""
        pool = self._device.pool()
        moved = abs(pool.allocated - self._resting) > _ALIKE * pool.reserved
        another, retried = recorded or self._recorded or moved, pool.retries > self._retries
        self._resting, self._retries, self._recorded = pool.allocated, pool.retries, recorded
        if not (another or retried):
            return
        usable, _ = self._device.usable_and_total()
        cached = pool.reserved - pool.allocated
        # The user may have begun the peak anew, and then it tells nothing.
        roomy = usable - pool.peak > _ROOMY * usable and pool.peak - pool.allocated > cached // 2
        if (retried and not roomy) or (another and cached > usable - pool.reserved):
            self._device.empty_cache()
