"""Where blocks will be once an answer is done, while it is thought about."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ..base import Action, Offload, Release, after
from ..places import ON_DEVICE, Place, Placed, Places


class Shadow:
    """The places of blocks, with what the actions of an answer change that is not done yet.

    own: the bytes on the device of the blocks of the step that goes on. resident: of all blocks.
    """

    def __init__(self, places: Places[Any], own: int) -> None:
        self._places = places
        self._changed: dict[int, tuple[Place, bool]] = {}
        self.own = own
        self.resident: int = places.resident

    def place(self, key: int) -> Place | None:
        """None for a block that is gone."""
        block = self._places.find(key)
        return None if block is None else self._now(block)[0]

    def follow(self, actions: Sequence[Action]) -> list[Action]:
        """Those of the actions that can be done where the blocks are then."""
        done = []
        for action in actions:
            block = self._places.find(action.key)
            if block is None:
                continue
            before, sinking = self._now(block)
            changed = after(type(action), before, sinking)
            if changed is not None:
                self._changed[action.key] = changed
                change = block.nbytes * ((changed[0] in ON_DEVICE) - (before in ON_DEVICE))
                self.own += change
                self.resident += change
                done.append(action)
        return done

    def free(self, nbytes: int, keep: Collection[int]) -> list[Action]:
        """Gives up so many bytes of the device, if there are as many, beside those to keep.

        What is leaving goes first, and then what was saved first.
        """
        actions: list[Action] = []
        for place in (Place.LEAVING, Place.DEVICE):
            for key, block in self._places.by_key.items():
                if nbytes <= 0:
                    return actions
                if key not in keep and not block.stuck and self.place(key) is place:
                    nbytes -= block.nbytes
                    actions += self.follow([Offload(key), Release(key)])
        return actions

    def at(self, place: Place) -> list[int]:
        """The keys of the blocks there that do not go on to disk, in the order of their saving."""
        now = ((key, self._now(block)) for key, block in self._places.by_key.items())
        return [key for key, (there, sinking) in now if there is place and not sinking]

    @property
    def any_below_host(self) -> bool:
        """Whether any block is on disk, or on its way there."""
        return any(block.below_host for block in self._places.by_key.values())

    def _now(self, block: Placed) -> tuple[Place, bool]:
        return self._changed.get(block.key, (block.place, block.sinking))
