"""The suite that every policy is put through."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_mem.policies import (
    Action,
    Dropped,
    Event,
    ForwardBegin,
    ForwardEnd,
    HostPressure,
    LayerBegin,
    LayerEnd,
    Policy,
    Saved,
)
from tiered_mem.policies.actions import after
from tiered_mem.policies.places import Placed, Places


def check_policy(make: Callable[[], Policy], min_layers: int = 0) -> None:
    """Tell the `Policy` that `make` returns of many histories, of models of `min_layers` layers and more.

    It never raises, and its actions only name blocks that are alive.
    """

    @settings(deadline=None)
    @given(policy_histories(min_layers))
    def check(history: list[Event]) -> None:
        policy = make()
        places: Places[Placed] = Places()
        policy.follow(places)
        live: set[int] = set()
        for event in history:
            match event:
                case ForwardBegin(_, num_layers):
                    policy.check(num_layers)
                case Saved(_, _, blocks):
                    for key, nbytes in blocks:
                        if key not in live:
                            places.add(Placed(key, nbytes))
                    live.update(key for key, _ in blocks)
                case Dropped(keys):
                    live.difference_update(keys)
                    for key in keys:
                        places.remove(places.by_key[key])
            for action in policy.decide(event):
                assert isinstance(action, Action)
                assert action.key in live, f"{action} after {event} names a block that is not alive"
                block = places.by_key[action.key]
                if (done := after(type(action), block.place, block.sinking)) is not None:
                    places.move(block, done[0])
                    block.sinking = done[1]

    check()


@st.composite
def policy_histories(draw: st.DrawFn, min_layers: int = 0) -> list[Event]:
    """What a manager may tell a policy, until every forward has ended and every block is dropped.

    Up to four graphs at a time; layers in any order, more than were told, ended by exceptions or run twice; blocks
    shared by layers and graphs, or saved after their layer's end; backwards at any time, more than once, from any
    layer; host pressure at any time.
    """
    history: list[Event] = []
    keys = itertools.count()
    layers: list[int] = []  # of each graph
    running: dict[int, int | None] = {}  # the graphs in their forward, with the layer that is at work
    saving: dict[int, int] = {}  # the layer that began last
    live: list[int] = []
    for _ in range(draw(st.integers(0, 50))):
        step = draw(st.sampled_from(["forward", "begin", "save", "end", "over", "backward", "drop", "pressure"]))
        if step == "forward" and len(running) < 4:
            running[len(layers)] = None
            told = draw(st.integers(min_layers, min_layers + 4))
            history.append(ForwardBegin(len(layers), told))
            layers.append(told + draw(st.integers(0, 2)))
        elif step == "drop" and live:
            order = draw(st.permutations(live))
            gone = draw(st.integers(1, len(live)))
            history.append(Dropped(order[:gone]))
            live = order[gone:]
        elif step == "pressure":
            history.append(HostPressure(draw(st.integers(1, 8))))
        elif step == "backward" and any(layers):
            graph = draw(st.sampled_from([g for g, n in enumerate(layers) if n]))
            history.append(LayerBegin(graph, draw(st.integers(0, layers[graph] - 1)), backward=True))
        elif running:
            graph = draw(st.sampled_from(list(running)))
            layer = running[graph]
            if step == "over":
                del running[graph]
                history.append(ForwardEnd(graph))
            elif step == "begin" and layers[graph]:
                running[graph] = saving[graph] = draw(st.integers(0, layers[graph] - 1))
                history.append(LayerBegin(graph, saving[graph]))
            elif step == "save" and graph in saving:
                saved = [next(keys), *live]
                chosen = draw(st.lists(st.sampled_from(saved), min_size=1, max_size=3, unique=True))
                live += [key for key in chosen if key not in live]
                history.append(Saved(graph, saving[graph], [(key, 1 + key % 4) for key in chosen]))
            elif step == "end" and layer is not None:
                running[graph] = None
                history.append(LayerEnd(graph, layer))
    last: list[Event] = [*map(ForwardEnd, running), *(Dropped([key]) for key in live)]
    return history + draw(st.permutations(last))
