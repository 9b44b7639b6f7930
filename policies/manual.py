"""Nothing moves unless the user says so."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Action, Event


class ManualPolicy:
    """Advises nothing: users decide themselves when a layer leaves the device and when it comes back."""

    def check(self, num_layers: int) -> None:
        """Suits every model."""

    def decide(self, event: Event) -> Sequence[Action]:
        return ()
