"""The link as steps show it, which is not always as it was measured before them."""

from __future__ import annotations

from dataclasses import replace

from .profile import Link

# Rates that differ by less are the same, as they are never quite equal. Of the share that each direction has beside
# the other less is known, and less depends on it.
_ALIKE = 0.03
_SHARE_ALIKE = 0.15
# Where steps never agree so far, less and less alike is the same, down to this.
_HARDLY_ALIKE = 0.25


class Rates:
    """The link that plans are made for.

    Before the first step it is as it was measured, perhaps while no other rank copied. Steps show what it is beside
    them. A figure that a step shows is taken over at once, until another step has shown the same. After that it
    takes two measured steps in a row to change it, so that one odd step makes no plan, and is not followed by
    another that undoes it.

    link: as it is taken for now.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._out, self._back = _Figure(link.out, _ALIKE), _Figure(link.back, _ALIKE)
        self._both = _Figure(link.both, _SHARE_ALIKE)

    def found_full(self, room: int | None) -> bool:
        """There is room for so many bytes at the other end, as far as is known. Whether that is another figure."""
        before = self.link.room
        if before is not None and room is not None and abs(room - before) <= _ALIKE * before:
            return False
        self.link = replace(self.link, room=room)
        return room != before

    @property
    def doubted(self) -> bool:
        """Whether the last measured step has shown another link, and the next one decides."""
        return any(each.other is not None for each in (self._out, self._back, self._both))

    def see(self, out: float, back: float, both: float) -> bool:
        """A step was measured. Whether the link is taken for another one now.

        out, back, both: as in a `Link`; 0 is not known.
        """
        pairs = ((self._out, out), (self._back, back), (self._both, both))
        changed = [each.see(seen) for each, seen in pairs if seen]
        self.link = replace(self.link, out=self._out.value, back=self._back.value, both=self._both.value)
        return any(changed)


class _Figure:
    """What a figure is taken for.

    alike: by less than this part it is the same. other: what the last step has shown; the next decides.
    """

    def __init__(self, value: float, alike: float) -> None:
        self.value = value
        self._alike = alike
        self._shown = self._confirmed = False
        self.other: float | None = None

    def see(self, seen: float) -> bool:
        if self._near(seen, self.value):
            self._confirmed, self.other = True, None
            return False
        if self._confirmed and self.other is None:
            self.other = seen
            return False
        agreed = self.other is not None and self._near(seen, self.other)
        if self._shown and not agreed:
            self._alike = max(self._alike, min(2 * self._alike, _HARDLY_ALIKE))
        self._shown, self.other = True, None
        if self._confirmed and not agreed:
            return False
        self.value, self._confirmed = seen, agreed
        return True

    def _near(self, one: float, other: float) -> bool:
        return abs(one - other) <= self._alike * other
