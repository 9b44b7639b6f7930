"""The part of the device that optimizer states have between steps, under a policy that plans for them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

from ..device.peak import DevicePeak
from ..policies import StatesShare
from .buckets import Buckets
from .states import States

# Whether there were states before the step, the bytes of its window, and the number of buckets that stay.
_Way = tuple[bool, int, int]


class Sharing:
    """Has as much of the states stay on the device as is planned, and measures what steps take beside that.

    Keeps no states alive, for these know it.

    share: what is planned. peak: measures steps.
    """

    def __init__(self, share: StatesShare, peak: DevicePeak) -> None:
        self._share = share
        self._peak = peak
        self._states: weakref.WeakSet[States] = weakref.WeakSet()
        self._kept_for: tuple[int | None, int, int] | None = None
        # Of each optimizer how its last measured step was made, and what it took beside all that is kept.
        self._steps: weakref.WeakKeyDictionary[Buckets, tuple[_Way, int]] = weakref.WeakKeyDictionary()

    def add(self, states: States) -> None:
        """These may have a part."""
        self._states.add(states)

    def leave_out(self, states: States) -> None:
        """These have none any more."""
        self._states.discard(states)

    def count(self) -> None:
        """Says how much of what is to stay is there."""
        if self._share.total and self._share.target != self._share.kept:
            self._share.kept = self._kept

    @contextlib.contextmanager
    def measured(self, buckets: Buckets) -> Iterator[None]:
        """Measures what a step takes of the device, where it is made otherwise than the one before, or sees it.

        In the first step there are no states that come through the window, but it is allotted to them already. What
        it takes indeed shows in the second, and may leave room for more to stay.
        """
        begun = any(bucket.states for bucket in buckets.all)
        way = begun, buckets.window_bytes, sum(bucket.stays for bucket in buckets.all)
        before, _ = self._steps.get(buckets, (None, 0))
        if before == way:
            yield
            self._peak.look()
            return
        with self._peak.measured() as most:
            yield
        self._steps[buckets] = way, most() - self._kept + (0 if begun else buckets.window_bytes)
        self._share.step_peak = max(peak for _, peak in self._steps.values())
        if begun and before is not None and not before[0]:
            self._share.target = None

    def keep(self) -> None:
        """Has as much stay as is planned, after each change of the plan or the states."""
        share, sharing = self._share, list(self._states)
        now = share.target, sum(states.version for states in sharing), len(sharing)
        if now == self._kept_for:
            return
        total = sum(states.buckets.nbytes for states in sharing)
        if total > share.total:
            share.target = None
        share.total = total
        share.rounding = sum(_rounding(bucket.nbytes) for states in sharing for bucket in states.buckets.all)
        left, done = share.planned, True
        for states in sharing:
            done &= states.keep(left)
            left -= sum(bucket.nbytes for bucket in states.buckets.all if bucket.stays)
        share.kept = self._kept
        self._kept_for = now if done else None

    @property
    def _kept(self) -> int:
        return sum(states.buckets.kept for states in list(self._states))


def _rounding(nbytes: int) -> int:
    """The most that torch's pool gives beyond what it is asked for: of small pieces, and of large ones."""
    return 1 << 20 if nbytes > 1 << 20 else 1 << 9
