"""Which parameters' states move together."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from tiered_mem.optimizer.bucket import pack
from tiered_mem.optimizer.layout import Field, Part, StateLayout

LIMIT = 1 << 16
SMALL_AND_LARGE = st.integers(0, LIMIT // 4) | st.integers(LIMIT // 2, LIMIT) | st.integers(0, 2 * LIMIT)


def layout(nbytes: int) -> StateLayout:
    """Of a state of one tensor."""
    if nbytes == 0:
        return StateLayout((), 0)
    part = Part(0, nbytes, torch.uint8, torch.Size([nbytes]), (1,))
    return StateLayout((Field(("moment",), (part,), None, None),), part.end)


@given(st.lists(SMALL_AND_LARGE, max_size=30))
def test_a_bucket_is_within_its_limit_and_no_two_would_fit_into_one(sizes: list[int]) -> None:
    """Unless a state alone is larger, or has nothing that moves."""
    layouts = [(Parameter(torch.empty(0)), layout(size)) for size in sizes]
    buckets = pack(layouts, LIMIT)
    assert {param for bucket in buckets for param in bucket.params} == {param for param, _ in layouts}
    assert sum(len(bucket.params) for bucket in buckets) == len(layouts)
    full = [bucket for bucket in buckets if bucket.nbytes]
    assert len(buckets) - len(full) == (0 in sizes)
    assert all(bucket.nbytes <= LIMIT or len(bucket.params) == 1 for bucket in full)
    assert all(one.nbytes + other.nbytes > LIMIT for one, other in itertools.combinations(full, 2))


@given(st.lists(st.integers(1, LIMIT), max_size=30))
def test_the_states_of_a_bucket_lie_one_behind_the_other(sizes: list[int]) -> None:
    for bucket in pack([(Parameter(torch.empty(0)), layout(size)) for size in sizes], LIMIT):
        parts = [part for fields in bucket.fields.values() for field in fields for part in field.parts]
        ends = [0, *(part.end for part in parts)]
        assert [part.offset for part in parts] == ends[:-1]
        assert bucket.nbytes == ends[-1]
