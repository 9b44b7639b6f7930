"""Where a policy believes blocks to be."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..base import Action, Fetch, Offload, Release, Reload, Spill


class Stage(Enum):
    """LEAVING: on its way to the host; SINKING: and from there to disk.

    RETURNING: on its way back, until backward uses it; so long it cannot leave again.
    """

    DEVICE = 0
    LEAVING = 1
    SINKING = 2
    HOST = 3
    DISK = 4
    RETURNING = 5


# What each action does to a block, by the place where it is.
_STEPS: dict[type[Action], dict[Stage | None, Stage]] = {
    Offload: {Stage.DEVICE: Stage.LEAVING},
    Release: {Stage.LEAVING: Stage.HOST, Stage.SINKING: Stage.DISK},
    Reload: {
        Stage.LEAVING: Stage.DEVICE,
        Stage.SINKING: Stage.DEVICE,
        Stage.HOST: Stage.RETURNING,
        Stage.DISK: Stage.RETURNING,
    },
    Spill: {Stage.LEAVING: Stage.SINKING, Stage.HOST: Stage.DISK},
    Fetch: {Stage.DISK: Stage.HOST},
}


@dataclass
class Whereabouts:
    """The blocks that are alive, by what was told and answered.

    resident: the bytes of those on the device; own: of these, the bytes of what the step that goes on has saved.
    """

    resident: int = 0
    own: int = 0
    _nbytes: dict[int, int] = field(default_factory=dict)
    _places: dict[int, Stage] = field(default_factory=dict)
    _own: set[int] = field(default_factory=set)
    # Of each place its blocks, those that came first in front.
    _at: dict[Stage, dict[int, None]] = field(default_factory=lambda: {place: {} for place in Stage})

    def begin_step(self) -> None:
        self._own.clear()
        self.own = 0

    @property
    def owns_any(self) -> bool:
        """Whether blocks of the step that goes on are alive."""
        return bool(self._own)

    def save(self, blocks: Iterable[tuple[int, int]]) -> list[int]:
        """Blocks are on the device. Of these, the keys of those that were leaving."""
        again = []
        for key, nbytes in blocks:
            if key in self._nbytes:
                if self._places[key] in (Stage.LEAVING, Stage.SINKING):
                    again.append(key)
                self._move(key, Stage.DEVICE)
                continue
            self._nbytes[key] = nbytes
            self._own.add(key)
            self._move(key, Stage.DEVICE)
        return again

    def drop(self, key: int) -> None:
        if key in self._nbytes:
            self._move(key, None)
            del self._nbytes[key]
            self._own.discard(key)

    def use(self, key: int) -> None:
        """Backward uses the block, which is brought back if it is away. One that is leaving goes on leaving."""
        if self._places.get(key) in (Stage.HOST, Stage.DISK, Stage.RETURNING):
            self._move(key, Stage.DEVICE)

    def refused(self, action: Action) -> None:
        """The action was not done."""
        if isinstance(action, Reload) and self._places.get(action.key) is Stage.RETURNING:
            self._move(action.key, Stage.HOST)
        elif isinstance(action, Offload) and action.key in self._places:
            self._move(action.key, Stage.DEVICE)

    def follow(self, actions: Sequence[Action]) -> list[Action]:
        """Those of the actions that can be done where the blocks are, which are taken for done."""
        done = []
        for action in actions:
            after = _STEPS[type(action)].get(self._places.get(action.key))
            if after is not None:
                self._move(action.key, after)
                done.append(action)
        return done

    def free(self, nbytes: int, keep: Collection[int]) -> list[Action]:
        """Gives up so many bytes of the device, if there are as many, beside those to keep.

        What is leaving goes first, and then what has been there for the longest.
        """
        actions: list[Action] = []
        for key in (*self._at[Stage.LEAVING], *self._at[Stage.SINKING], *self._at[Stage.DEVICE]):
            if nbytes <= 0:
                break
            if key not in keep:
                nbytes -= self._nbytes[key]
                actions += self.follow([Offload(key), Release(key)])
        return actions

    def at(self, place: Stage) -> Iterator[int]:
        """The keys of the blocks there, those that came first in front."""
        return iter(list(self._at[place]))

    def any_at(self, place: Stage) -> bool:
        return bool(self._at[place])

    def nbytes(self, key: int) -> int:
        return self._nbytes[key]

    def place(self, key: int) -> Stage | None:
        return self._places.get(key)

    def _move(self, key: int, to: Stage | None) -> None:
        before = self._places.pop(key, None)
        change = self._nbytes[key] * (_on_device(to) - _on_device(before))
        self.resident += change
        if key in self._own:
            self.own += change
        if before is not None:
            del self._at[before][key]
        if to is not None:
            self._places[key] = to
            self._at[to][key] = None


def _on_device(place: Stage | None) -> bool:
    return place in (Stage.DEVICE, Stage.LEAVING, Stage.SINKING, Stage.RETURNING)
