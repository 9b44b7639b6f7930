"""Files that are wrong in every way: an error of ours, or the tensors that are in them.

This is the short form; python -m tests.spill.fuzz_records reads as many as one likes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.spill.fuzz_records import MUTATIONS, REFUSED, outcome
from tests.spill.mutations import samples
from tests.spill.records import UNIT, Sample, forged, sample, text_of
from tiered_mem.errors import CorruptRecord
from tiered_mem.spill.record import parse_header

SAMPLES = samples()
SEALED_START = b'{"__metadata__":{"spill_format":"1","header_crc32":"00000000"'
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.parametrize("kind", MUTATIONS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**64), made=st.sampled_from(SAMPLES))
def test_a_wrong_file_is_refused_or_read_rightly(tmp_path: Path, kind: str, seed: int, made: Sample) -> None:
    outcome(made, kind, MUTATIONS[kind](random.Random(seed), made), tmp_path / "record")


@pytest.mark.parametrize("kind", ["truncated", "grown", "another_length"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**64), made=st.sampled_from(SAMPLES))
def test_another_length_is_never_read(tmp_path: Path, kind: str, seed: int, made: Sample) -> None:
    data = MUTATIONS[kind](random.Random(seed), made)
    if data != made.data:
        assert outcome(made, kind, data, tmp_path / "record") == REFUSED


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 2), st.integers(0, 1 << 64))
def test_random_bytes_are_no_header(data: bytes, units: int, file_bytes: int) -> None:
    data = data.ljust(units * UNIT, b" ")
    with pytest.raises(CorruptRecord):
        parse_header(data, file_bytes, "a file")


@settings(max_examples=100, deadline=None)
@given(values, st.dictionaries(st.sampled_from(["run", "number", "step", "algorithm", "kind", "write"]), values))
def test_any_json_that_is_sealed_is_no_header(tensor: object, about: dict[str, object]) -> None:
    more = json.dumps(about, separators=(",", ":")).encode()[1:-1]
    tensors = json.dumps(tensor, separators=(",", ":")).encode()
    data = forged(SEALED_START + (b"," + more if more else b"") + b'},"a":' + tensors + b"}")
    with pytest.raises(CorruptRecord):
        parse_header(data, len(data) + UNIT, "a file")


@settings(max_examples=100, deadline=None)
@given(values, st.data())
def test_any_value_in_a_sound_header_is_refused(value: object, data: st.DataObject) -> None:
    made = sample(("a", "float32", 400), ("b", "int8", 1))
    text = text_of(made.data)
    old = data.draw(
        st.sampled_from([b'"3"', b'"11"', b'"crc32"', b'"float32"', b"[0,400]", b"400", b'"F32"', b"[100]"])
    )
    changed = text.replace(old, json.dumps(value, separators=(",", ":")).encode())
    sealed = forged(changed)
    try:
        found = parse_header(sealed, len(made.data) - UNIT + len(sealed), "a file")
    except CorruptRecord:
        return
    assert found.encode() == sealed
    assert isinstance(value, str) or changed == text
