"""Which schedules and orders SynchronizationDictPolicy refuses, and what it says of them."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.pipeline import PIPELINE, PIPELINE_ENTRIES, Entries
from tiered_mem.policies import SynchronizationDictPolicy

NOT_OVER = "its own forward is not over when it is released"
RELOADED_FIRST = "it is reloaded before it is released"
RELOADED_THEN = "it is reloaded at the moment at which it is released"
RELOADED_TOO_SOON = "it is reloaded before its own forward is over"
NEEDED_FIRST = "its own backward needs it before it is reloaded"


@pytest.mark.parametrize(
    ("entry", "moments", "fault"),
    [
        ((True, 3, False, 4), ("layer 3 begins its forward", "layer 4 begins its backward"), NOT_OVER),
        ((True, 2, True, 5), ("layer 2 begins its forward", "layer 5 begins its forward"), NOT_OVER),
        ((True, 5, True, 4), ("layer 5 begins its forward", "layer 4 begins its forward"), RELOADED_FIRST),
        ((False, 5, True, 5), ("layer 5 begins its backward", "layer 5 begins its forward"), RELOADED_FIRST),
        ((True, 5, True, 5), ("layer 5 begins its forward", "layer 5 begins its forward"), RELOADED_THEN),
        ((False, 3, False, 3), ("layer 3 begins its backward", "layer 3 begins its backward"), RELOADED_THEN),
        ((False, 1, True, 2), ("layer 1 begins its backward", "layer 2 begins its forward"), RELOADED_TOO_SOON),
        ((False, 3, False, 2), ("layer 3 begins its backward", "layer 2 begins its backward"), NEEDED_FIRST),
        ((False, 3, True, 6), ("layer 3 begins its backward", "layer 6 begins its forward"), NEEDED_FIRST),
    ],
)
def test_an_entry_that_is_wrong_in_every_order_is_named(
    entry: tuple[bool, int, bool, int], moments: tuple[str, str], fault: str
) -> None:
    message = f"^layer 3 is released when {moments[0]} and reloaded when {moments[1]}, but {fault}$"
    with pytest.raises(ValueError, match=message):
        SynchronizationDictPolicy({3: entry})


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ((False, 0, True, 3), NOT_OVER),  # B0 comes before F2
        ((False, 1, True, 3), RELOADED_FIRST),
        ((True, 3, False, 0), RELOADED_FIRST),
        ((False, 1, False, 1), RELOADED_THEN),
        ((True, 3, False, 3), NEEDED_FIRST),
        ((False, 3, False, 3), RELOADED_THEN),
        ((False, 3, False, 2), RELOADED_FIRST),
        ((False, 2, False, 3), NEEDED_FIRST),
    ],
)
def test_with_an_order_the_moments_are_compared_exactly(entry: tuple[bool, int, bool, int], fault: str) -> None:
    order = ["F0", "F1", "B0", "F2", "F3", "B1", "B2", "B3"]
    with pytest.raises(ValueError, match=rf"^layer 2 is released .*, but {fault}$"):
        SynchronizationDictPolicy({2: entry}, order=order)
    SynchronizationDictPolicy({2: (True, 3, False, 1)}, order=order)
    SynchronizationDictPolicy({2: (False, 1, False, 2)}, order=order)


@pytest.mark.parametrize(
    ("entries", "wishes"),
    [
        (
            {1: (True, 4, False, 2), 2: (True, 4, False, 1)},
            "layer 1 needs the backward of layer 2 to begin before the backward of layer 1; "
            "layer 2 needs the backward of layer 1 to begin before the backward of layer 2",
        ),
        (
            {0: (True, 5, True, 6), 1: (False, 3, False, 5), 2: (False, 1, True, 4), 4: (True, 6, False, 2)},
            "layer 1 needs the backward of layer 5 to begin before the backward of layer 1; "
            "layer 2 needs the backward of layer 1 to begin before the forward of layer 4",
        ),
        (
            {1: (False, 2, True, 4), 2: (True, 3, False, 1)},
            "layer 1 needs the backward of layer 2 to begin before the forward of layer 4; "
            "layer 1 needs the forward of layer 4 to begin before the backward of layer 1; "
            "layer 2 needs the backward of layer 1 to begin before the backward of layer 2",
        ),
    ],
)
def test_entries_that_contradict_each_other_are_named(entries: Entries, wishes: str) -> None:
    for layer, entry in entries.items():
        SynchronizationDictPolicy({layer: entry})
    with pytest.raises(ValueError, match=r"^no order of the backwards suits these entries together: ") as caught:
        SynchronizationDictPolicy(entries)
    assert sorted(str(caught.value).partition(": ")[2].split("; ")) == sorted(wishes.split("; "))


def orders(num_layers: int) -> list[list[str]]:
    """All orders in which so many layers can run forward and backward."""
    if num_layers == 0:
        return [[]]
    last = num_layers - 1
    return [
        [*shorter[:f], f"F{last}", *shorter[f:b], f"B{last}", *shorter[b:]]
        for shorter in orders(last)
        for f in range(shorter.index(f"F{last - 1}") + 1 if last else 0, len(shorter) + 1)
        for b in range(f, len(shorter) + 1)
    ]


def fits(entries: Entries, order: list[str]) -> bool:
    place = {text: i for i, text in enumerate(order)}
    return all(
        place[f"F{layer}"]
        < place[f"{'BF'[offload_fwd]}{offload_num}"]
        < place[f"{'BF'[reload_fwd]}{reload_num}"]
        <= place[f"B{layer}"]
        for layer, (offload_fwd, offload_num, reload_fwd, reload_num) in entries.items()
    )


ORDERS = orders(4)
FORMS = list(product([True, False], range(4), [True, False], range(4)))
FIT_ALONE = [(i, form) for i in range(4) for form in FORMS if any(fits({i: form}, order) for order in ORDERS)]
ENTRIES = st.one_of(
    st.dictionaries(st.integers(0, 3), st.sampled_from(FORMS), max_size=2),
    st.lists(st.sampled_from(FIT_ALONE), max_size=4).map(dict),
)


def is_accepted(entries: Entries, order: list[str] | None) -> bool:
    try:
        SynchronizationDictPolicy(entries, order=order)
    except ValueError:
        return False
    return True


@settings(deadline=None, max_examples=1000)
@given(ENTRIES)
def test_a_schedule_is_accepted_if_some_order_suits_it(entries: Entries) -> None:
    assert is_accepted(entries, None) == any(fits(entries, order) for order in ORDERS)


@settings(deadline=None)
@given(ENTRIES, st.data())
def test_with_an_order_a_schedule_is_accepted_if_that_order_suits_it(entries: Entries, data: st.DataObject) -> None:
    order = data.draw(st.sampled_from(ORDERS))
    assert is_accepted(entries, order) == fits(entries, order)


@pytest.mark.parametrize(
    "entry",
    [
        (True, 2, False),
        (True, 2, False, 1, 1),
        (1, 2, False, 1),
        (True, 2, 0, 1),
        (True, True, False, 1),
        (True, 2, False, 1.0),
        (True, "2", False, 1),
        (True, -2, False, 1),
        (True, 2, False, -1),
        None,
        "F2B1",
    ],
)
def test_an_entry_of_another_form_is_refused(entry: object) -> None:
    with pytest.raises(ValueError, match=r"^the entry of layer 1 must be \(offload_fwd, .* not ") as caught:
        SynchronizationDictPolicy({1: entry})  # type: ignore[dict-item]
    assert str(caught.value).endswith(f"not {entry!r}")


@pytest.mark.parametrize("layer", [-1, True, "0", 1.0])
def test_a_key_that_is_no_layer_is_refused(layer: object) -> None:
    with pytest.raises(ValueError, match=rf"^{layer!r} is a key of the schedule; layers are numbers from 0$"):
        SynchronizationDictPolicy({layer: (True, 2, False, 1)})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (["F0", "B"], r"^order\[1\] is 'B'; use F or B with the number of a layer, such as 'F0'$"),
        (["F0", "b0"], r"^order\[1\] is 'b0'"),
        (["F0", 0], r"^order\[1\] is 0;"),
        ("F0B0", r"^order\[0\] is 'F'"),
        (["F0", "B0", "F0"], r"^order has F0 twice$"),
        (["F0", "B0", "B0"], r"^order has B0 twice$"),
        (["F0", "F2"], r"^order has F2 where F1 is due: layers are numbered as their forwards begin$"),
        (["B0", "F0"], r"^order has B0 and no F0 before it$"),
        (["F0", "F1", "B0"], r"^order has F1 and no B1$"),
    ],
)
def test_an_order_that_is_none_is_refused(order: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SynchronizationDictPolicy({}, order=order)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ((5, (True, 6, False, 5)), "layer 5 has an entry, but {}"),
        (
            (2, (True, 5, False, 2)),
            "layer 2 is never released: it waits until layer 5 begins its forward, but {}",
        ),
        (
            (2, (True, 3, False, 6)),
            "layer 2 is never reloaded: it waits until layer 6 begins its backward, but {}",
        ),
        (
            (2, (True, 3, True, 7)),
            "layer 2 is never reloaded: it waits until layer 7 begins its forward, but {}",
        ),
    ],
)
def test_a_layer_that_does_not_exist_is_named(entry: tuple[int, tuple[bool, int, bool, int]], message: str) -> None:
    layer, moments = entry
    policy = SynchronizationDictPolicy({layer: moments})
    policy.check(8)
    has = "the model has 5 layers, counted from 0"
    with pytest.raises(ValueError, match=f"^{message.format(has)}$"):
        policy.check(5)
    order = [f"F{i}" for i in range(5)] + [f"B{i}" for i in range(5)]
    has = "order has 5 layers, counted from 0"
    with pytest.raises(ValueError, match=f"^{message.format(has)}$"):
        SynchronizationDictPolicy({layer: moments}, order=order)


def test_an_order_of_another_model_is_refused() -> None:
    policy = SynchronizationDictPolicy(PIPELINE_ENTRIES, order=PIPELINE)
    policy.check(8)
    for num_layers in (7, 9):
        with pytest.raises(ValueError, match=f"^order has 8 layers, but the model has {num_layers}$"):
            policy.check(num_layers)
