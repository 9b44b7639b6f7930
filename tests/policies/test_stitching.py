"""A step of layers that are treated in different ways is that which would be recorded."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.policies.simulated.random_steps import MIB
from tests.policies.simulated.steps import Layer, Op, one_forward_one_backward
from tests.policies.simulated.treated import WAYS, Model, decoder
from tiered_mem.policies.actions import How
from tiered_mem.policies.planning.profile import Profile
from tiered_mem.policies.planning.recording import Name
from tiered_mem.policies.planning.stitching import Backward, RecordedStep, Ways


def random_model(seed: int, order: Sequence[str] = ("F0", "B0")) -> Model:
    rng = random.Random(seed)
    layers: list[Layer] = []
    for _ in range(rng.randint(1, 6)):
        sizes = [[rng.randint(1, 64) * MIB for _ in range(rng.randint(0, 3))] for _ in range(rng.randint(1, 4))]
        if not layers:
            sizes[0].append(MIB)  # the end of which is told after all of the layers' work
        layers.append(
            [
                Op((rng.random(), 2 * rng.random()), some, (rng.randint(0, 64) * MIB,) * 2, rng.random() < 0.5)
                for some in sizes
            ]
        )
    return Model(layers, rng.randint(0, 8) * MIB, order)


def random_choice(model: Model, seed: int) -> dict[int, How]:
    rng = random.Random(-seed)
    ways = {layer: rng.choice(WAYS) for layer in range(len(model.layers))}
    return {layer: way for layer, way in ways.items() if way is not None}


def same(some: RecordedStep, other: RecordedStep) -> bool:
    a, b = some.profile, other.profile
    return (
        (list(some.names), list(some.blocks)) == (list(other.names), list(other.blocks))
        and a.full == b.full
        and list(a.seconds) == pytest.approx(list(b.seconds))
        and (a.nbytes, a.saved, a.used, a.dropped, a.backward) == (b.nbytes, b.saved, b.used, b.dropped, b.backward)
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_mixture_is_what_would_be_recorded(seed: int) -> None:
    model = random_model(seed)
    choice = random_choice(model, seed)
    assert same(model.ways.stitched(choice), model.recorded(choice))


@pytest.mark.parametrize("seed", range(10))
def test_a_mixture_of_microbatches(seed: int) -> None:
    """In a pipeline several graphs are under way."""
    model = random_model(seed, one_forward_one_backward(5, 3))
    choice = random_choice(model, seed)
    assert same(model.ways.stitched(choice), model.recorded(choice))


def test_each_way_by_itself_is_as_it_was_recorded() -> None:
    model = decoder(4)
    for way in WAYS:
        assert same(model.ways.stitched(model.all(way)), model.recorded(model.all(way)))


def test_a_way_that_was_not_recorded_keeps_all() -> None:
    model = decoder(4)
    ways = Ways({None: model.recorded(), "cheap": model.recorded(model.all("cheap"))})
    assert same(ways.stitched({1: "full", 2: "cheap"}), model.recorded({2: "cheap"}))


def test_no_layer_gains_time_by_being_computed_again() -> None:
    """Where the step was measured as faster, that was chance."""
    model = decoder(4)
    steps = dict(model.ways.steps)
    fast = steps["cheap"].profile
    steps["cheap"] = RecordedStep(steps["cheap"].names, steps["cheap"].blocks, fast.scaled(0.5))
    stitched = Ways(steps).stitched(model.all("cheap")).profile
    assert stitched.compute == pytest.approx(model.recorded().profile.compute)


def test_other_orders_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="in other orders"):
        Ways({None: decoder(4).recorded(), "full": decoder(3).recorded(decoder(3).all("full"))})


def test_what_is_known_of_a_layer_where_its_backward_begins() -> None:
    """The block 0 of the first of two is what the second is called with, and somebody else has block 1."""
    names: list[Name] = [
        *[("begin", 0, 2, 0), ("forward", 0, 0, 0), ("saved", 0, 0, 0), ("end", 0, 0, 0)],
        *[("forward", 0, 1, 0), ("saved", 0, 1, 0), ("end", 0, 1, 0), ("over", 0, 0)],
        *[("backward", 0, 1, 0), ("used", (0, 1, 0), 0), ("dropped", (0, 1, 0), 0), ("used", (0, 0, 0), 0)],
        *[("backward", 0, 0, 0), ("used", (0, 0, 1), 0), ("dropped", (0, 0, 0), 0)],
    ]
    standing = [100] * len(names)
    most = [*standing]
    most[5], most[9], most[11] = 130, 140, 150  # in the second forward, in its backward, and after its last use
    lives = {"saved": [2, 2, 5], "used": [11, 13, 9], "dropped": [14, 14, 10], "backward": [8, 12, 8]}
    profile = Profile(
        seconds=[1.0] * len(names),
        unmovable=most,
        nbytes=[10, 5, 20],
        standing=standing,
        loose=[3, 13, 6],
        **lives,
    )
    step = RecordedStep(names, [(0, 0, 0), (0, 0, 1), (0, 1, 0)], profile)
    layer = step.backwards()[1]
    rises, twice = {(0, 0), (0, 0), (40, 0), (-20, 20), (30, 20)}, {(0, 0), (20, 0), (-10, 20)}
    assert layer == Backward(
        standing=105, full=135, forward=50, saved=20, borrowed=10, rises=frozenset(rises), twice=frozenset(twice)
    )
    assert layer.coming(7, 3, trial=False) == 3 + 10 + 20 + 40
    assert layer.coming(40, 3, trial=False) == 40 + 50
    assert layer.coming(7, 3, trial=False, beside=4, stays=math.inf) == 4 + 3 + 10 + 20 + 30 + 20
    assert layer.coming(7, 3, trial=False, beside=4, stays=15) == 4 + 3 + 10 + 20 + 30 + 15
    assert layer._replace(twice=frozenset({(60, 0)})).coming(7, 3, trial=True) == 3 + 10 + 20 + 60
    fuller = layer._replace(standing=200, full=140, forward=1, rises=frozenset({(5, 5)}))
    assert layer.or_more(fuller)[:5] == (200, 140, 50, 20, 10)
    assert layer.or_more(fuller).rises == rises | {(5, 5)}


def test_how_far_memory_rises_where_layers_are_computed_again() -> None:
    """Also of the first, and whatever else comes meanwhile, as what other layers have saved does."""
    model = decoder(4)
    step = model.recorded(model.all("full"))
    assert step.rises() == dict.fromkeys(range(4), 320 * MIB)
    first = step.names.index(("used", (0, 2, 0), 0))
    more = [k >= first and 40 * MIB for k in range(len(step.names))]
    standing, unmovable = (list(map(int.__add__, n, more)) for n in (step.standing, step.profile.unmovable))
    assert (
        replace(step, profile=replace(step.profile, standing=standing, unmovable=unmovable)).rises() == step.rises()
    )
