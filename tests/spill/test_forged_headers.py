"""Headers whose own checksum is right, but which no record has."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.spill.records import UNIT, forged, sample, text_of, tree_of
from tiered_mem.errors import CorruptRecord
from tiered_mem.spill.record import parse_header

Change = Callable[[dict[str, Any]], object]
CHANGES: dict[str, Change] = {
    "a missing key": lambda tree: tree["__metadata__"].pop("run"),
    "a key too many": lambda tree: tree["__metadata__"].update(more="x"),
    "a tensor too many": lambda tree: tree.update(c={"dtype": "U8", "shape": [0], "data_offsets": [8192, 8192]}),
    "a tensor that lacks": lambda tree: tree.pop("b"),
    "no filler": lambda tree: tree.pop("__pad__.0"),
    "a filler of another name": lambda tree: tree.update({"__pad__.2": tree.pop("__pad__.1")}),
    "no metadata": lambda tree: tree.pop("__metadata__"),
    "metadata that is a list": lambda tree: tree.update(__metadata__=["x"]),
    "a tensor that is null": lambda tree: tree.update(a=None),
    "another dtype": lambda tree: tree["a"].update(dtype="I32"),
    "a shape of two dimensions": lambda tree: tree["a"].update(shape=[10, 10]),
    "a key too many in a tensor": lambda tree: tree["a"].update(crc32="x"),
    "three offsets": lambda tree: tree["a"].update(data_offsets=[0, 400, 400]),
    "offsets that are NaN": lambda tree: tree["a"].update(data_offsets=[0, float("nan")]),
    "offsets that are infinite": lambda tree: tree["a"].update(data_offsets=[float("-inf"), float("inf")]),
    "offsets that are text": lambda tree: tree["a"].update(data_offsets=["0", "400"]),
    "offsets that are floats": lambda tree: tree["a"].update(data_offsets=[0, 400.0], shape=[100.0]),
    "offsets that are bools": lambda tree: tree["b"].update(data_offsets=[False, True], shape=[True]),
    "offsets turned round": lambda tree: tree["a"].update(data_offsets=[400, 0]),
    "offsets elsewhere": lambda tree: tree["b"].update(data_offsets=[8, 9]),
    "offsets beyond all files": lambda tree: tree["a"].update(data_offsets=[0, 1 << 63], shape=[1 << 61]),
    "a run that is a number": lambda tree: tree["__metadata__"].update(run=7),
    "a dtype that is a list": lambda tree: tree["__metadata__"].update({"dtype.a": []}),
    "a dtype that is a number": lambda tree: (
        tree["__metadata__"].update({"dtype.b": 5}),
        tree["b"].update(dtype="U8"),
    ),
    "a step below zero": lambda tree: tree["__metadata__"].update(step="-1"),
    "a step with a plus": lambda tree: tree["__metadata__"].update(step="+1"),
    "a step in Arabic digits": lambda tree: tree["__metadata__"].update(step="\u0661"),
    "a step beyond all bounds": lambda tree: tree["__metadata__"].update(step=str(1 << 63)),
    "a step of very many digits": lambda tree: tree["__metadata__"].update(step="9" * 5000),
    "a step that is infinite": lambda tree: tree["__metadata__"].update(step=float("inf")),
    "another algorithm": lambda tree: tree["__metadata__"].update(algorithm="md5"),
    "an algorithm that is a list": lambda tree: tree["__metadata__"].update(algorithm=[]),
    "a checksum too short": lambda tree: tree["__metadata__"].update({"checksum.a": "1234567"}),
    "a checksum in capitals": lambda tree: tree["__metadata__"].update({"checksum.a": "ABCDEF01"}),
    "a checksum of no digits": lambda tree: tree["__metadata__"].update({"checksum.a": ""}),
    "half a character": lambda tree: tree["__metadata__"].update(run="\ud800"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_header_that_is_sealed_but_wrong_is_refused(change: Change) -> None:
    made = sample(("a", "float32", 400), ("b", "int8", 1))
    tree = tree_of(made.data)
    change(tree)
    data = forged(json.dumps(tree, separators=(",", ":")).encode())
    with pytest.raises(CorruptRecord):
        parse_header(data, len(made.data) - UNIT + len(data), "a file")


TEXTS = {
    "a value twice": (b'"run":"run-7"', b'"run":"run-7","run":"run-7"'),
    "a value twice, another first": (b'"run":"run-7"', b'"run":"run-8","run":"run-7"'),
    "a space more": (b'"kind":', b'"kind": '),
    "a line's end": (b'"kind":', b'\n"kind":'),
    "a letter written otherwise": (b'"kind":"a', b'"kind":"\\u0061'),
    "no UTF-8": (b"activation", b"\xff\xfe"),
    "a number of too many digits": (b"[0,400]", b"[0," + b"9" * 5000 + b"]"),
    "a number of many digits": (b"[0,400]", b"[0," + b"9" * 4000 + b"]"),
    "a zero with a sign": (b"[0,400]", b"[-0,400]"),
    "a deep list": (b"[0,400]", b"[" * 100_000 + b"]" * 100_000),
    "a deep object": (b"[0,400]", b'{"":' * 100_000 + b"1" + b"}" * 100_000),
    "not JSON": (b'"kind":', b'"kind"='),
    "more behind": (b'"data_offsets":[4097,8192]}}', b'"data_offsets":[4097,8192]}}{}'),
    "NUL behind": (b'"data_offsets":[4097,8192]}}', b'"data_offsets":[4097,8192]}}\0'),
    "a newline behind": (b'"data_offsets":[4097,8192]}}', b'"data_offsets":[4097,8192]}}\n'),
}


@pytest.mark.parametrize("change", TEXTS.values(), ids=TEXTS)
def test_a_text_that_is_sealed_but_written_otherwise_is_refused(change: tuple[bytes, bytes]) -> None:
    made = sample(("a", "float32", 400), ("b", "int8", 1))
    text = text_of(made.data)
    assert text.count(change[0]) == 1
    data = forged(text.replace(*change))
    with pytest.raises(CorruptRecord) as caught:
        parse_header(data, len(made.data) - UNIT + len(data), "a file")
    assert len(str(caught.value)) < 1000


def test_a_header_longer_than_it_needs_is_refused() -> None:
    made = sample(("a", "float32", 400))
    data = forged(text_of(made.data).ljust(UNIT))
    with pytest.raises(CorruptRecord, match="text of the header"):
        parse_header(data, len(made.data) + UNIT, "a file")
