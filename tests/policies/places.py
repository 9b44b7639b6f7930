"""Where the blocks are that a policy is told of, by what it answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from tiered_mem.policies import (
    Action,
    Dropped,
    Event,
    Fetch,
    LayerBegin,
    Offload,
    Policy,
    Release,
    Reload,
    Saved,
    Spill,
)

Place = Literal["device", "leaving", "host", "disk"]


@dataclass
class Places:
    """Does what the policy answers, at once, and passes over what the place of a block rules out.

    When a graph's backward goes on to another layer, it has had the blocks of the last one on the device.

    strict: to pass over an answer is a failure, as is an answer about a block that is not alive.
    """

    policy: Policy
    strict: bool = True
    place: dict[int, Place] = field(default_factory=dict)
    nbytes: dict[int, int] = field(default_factory=dict)
    home: dict[int, tuple[int, int]] = field(default_factory=dict)
    reached: dict[int, int] = field(default_factory=dict)

    def tell(self, *events: Event) -> list[Action]:
        return [action for event in events for action in self._tell(event)]

    def keys(self, *places: Place) -> set[int]:
        return {key for key, place in self.place.items() if place in places}

    def size(self, *places: Place) -> int:
        return sum(self.nbytes[key] for key in self.keys(*places))

    def on_device(self) -> int:
        return self.size("device", "leaving")

    def _tell(self, event: Event) -> Iterable[Action]:
        match event:
            case Saved(graph, layer, blocks):
                for key, nbytes in blocks:
                    before = self.home.get(key, (graph, layer))
                    self.home[key] = graph, max(layer, before[1]) if before[0] == graph else layer
                    self.place[key] = "device"
                    self.nbytes[key] = nbytes
            case Dropped(keys):
                for key in keys:
                    self.place.pop(key, None)
                    self.home.pop(key, None)
            case LayerBegin(graph, layer, backward=True) if any(of == graph for of, _ in self.home.values()):
                last = self.reached.get(graph, layer)
                self.reached[graph] = layer
                if last != layer:
                    used = [key for key, home in self.home.items() if home == (graph, last)]
                    self.place.update((key, "device") for key in used if self.place[key] != "leaving")
        graphs = {graph for graph, _ in self.home.values()}
        self.reached = {graph: layer for graph, layer in self.reached.items() if graph in graphs}
        actions = self.policy.decide(event)
        for action in actions:
            self._do(action, event)
        return actions

    def _do(self, action: Action, event: Event) -> None:
        possible: tuple[Place, ...]
        after: Place
        match action:
            case Offload():
                possible, after = ("device",), "leaving"
            case Release():
                possible, after = ("leaving",), "host"
            case Reload():
                possible, after = ("leaving", "host", "disk"), "device"
            case Spill():
                possible, after = ("host",), "disk"
            case Fetch():
                possible, after = ("disk",), "host"
        place = self.place.get(action.key)
        if place in possible:
            self.place[action.key] = after
        else:
            # Nothing but a policy's own advice sends blocks to disk, so that it knows which of them are there.
            lenient = not self.strict and not isinstance(action, Spill | Fetch)
            assert lenient, f"{action} after {event}, when the block is {place or 'gone'}"
