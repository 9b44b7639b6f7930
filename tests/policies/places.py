"""Where the blocks are that a policy is told of, by what it answers."""

from __future__ import annotations

from collections.abc import Sequence

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
from tiered_mem.policies.places import Place, Placed, Places


class Obeyed(Policy):
    """A policy whose answers are done at once, but for those that the place of a block rules out.

    When a graph's backward goes on to another layer, it has had the blocks of the last one on the device.

    strict: to pass over an answer is a failure, as is an answer about a block that is not alive.
    """

    def __init__(self, policy: Policy, *, strict: bool = True) -> None:
        self.policy = policy
        self.check = policy.check
        self.strict = strict
        self.home: dict[int, tuple[int, int]] = {}
        self.reached: dict[int, int] = {}
        self.follow(Places())
        policy.follow(self.places)

    def tell(self, *events: Event) -> list[Action]:
        return [action for event in events for action in self.decide(event)]

    def keys(self, *places: str) -> set[int]:
        return {key for key, block in self.places.by_key.items() if block.place.value in places}

    def size(self, *places: str) -> int:
        return sum(self.places.by_key[key].nbytes for key in self.keys(*places))

    def on_device(self) -> int:
        assert self.places.resident == self.size("device", "leaving")
        return self.places.resident

    def decide(self, event: Event) -> Sequence[Action]:
        places = self.places
        match event:
            case Saved(graph, layer, blocks):
                for key, nbytes in blocks:
                    before = self.home.get(key, (graph, layer))
                    self.home[key] = graph, max(layer, before[1]) if before[0] == graph else layer
                    if (block := places.find(key)) is None:
                        places.add(Placed(key, nbytes))
                    else:
                        places.move(block, Place.DEVICE)
            case Dropped(keys):
                for block in filter(None, map(places.find, keys)):
                    places.remove(block)
                    del self.home[block.key]
            case LayerBegin(graph, layer, backward=True) if any(of == graph for of, _ in self.home.values()):
                last = self.reached.get(graph, layer)
                self.reached[graph] = layer
                if last != layer:
                    for key, block in places.by_key.items():
                        if self.home[key] == (graph, last) and block.place is not Place.LEAVING:
                            places.move(block, Place.DEVICE)
        graphs = {graph for graph, _ in self.home.values()}
        self.reached = {graph: layer for graph, layer in self.reached.items() if graph in graphs}
        actions = self.policy.decide(event)
        for action in actions:
            self._do(action, event)
        return actions

    def _do(self, action: Action, event: Event) -> None:
        block = self.places.find(action.key)
        possible, to = _DONE[type(action)]
        if block is not None and block.place in possible:
            self.places.move(block, to)
            block.rising = isinstance(action, Fetch)
        else:
            # Nothing but a policy's own advice sends blocks to disk, so that it knows which of them are there.
            lenient = not self.strict and not isinstance(action, Spill | Fetch)
            assert lenient, f"{action} after {event}, when the block is {block.place if block else 'gone'}"


_DONE: dict[type[Action], tuple[tuple[Place, ...], Place]] = {
    Offload: ((Place.DEVICE,), Place.LEAVING),
    Release: ((Place.LEAVING,), Place.HOST),
    Reload: ((Place.LEAVING, Place.HOST, Place.DISK), Place.DEVICE),
    Spill: ((Place.HOST,), Place.DISK),
    Fetch: ((Place.DISK,), Place.HOST),
}
