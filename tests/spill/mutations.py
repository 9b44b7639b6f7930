"""Ways for a record's file to be wrong, each drawn from a random generator.

DAMAGE is what a drive, a crash or another program may do. FORGERIES have a header whose own checksum is right, so
that all that stands behind that checksum is reached; some of them are whole records, if other ones.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

from tests.spill.records import UNIT, Sample, forged, sample, text_of, tree_of

Mutation = Callable[[random.Random, Sample], bytes]

ODD_NUMBERS = ("NaN", "Infinity", "-Infinity", "-1", "-0", "0.0", "1e3", "1e999", "true", "null", '"0"', "[]", "{}")
ODD_INTS = (0, 1, -1, UNIT, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**100, 10**4000)
ODD_TEXTS = (
    *("", "-", "--------", "none", "md5", "1e3", " 1", "\uff10", "\ud800", "\0", "U8", "F64", "__pad__.0"),
    "x" * 5000,
)


def samples(run: str = "run-7", write: int = 5) -> list[Sample]:
    """Records of all kinds, small ones. Those of two runs have the same shape and other bytes."""
    shapes: list[tuple[str, list[tuple[str, str, int]]]] = [
        ("crc32", [("block.0", "float32", 4000)]),
        ("xxh3_64", [("a", "bfloat16", 6), ("b", "int64", 4096), ("c", "bool", 0), ("d", "complex128", 5008)]),
        ("none", [("a", "float8_e4m3fn", 100), ("b", "qint8", 31)]),
        ("xxh3_64", [(f"block.{index}", "uint8", index) for index in range(40)]),
        ("crc32", [("\N{SNOWMAN}", "float32", 7), ("", "complex64", 0)]),
    ]
    return [
        sample(*entries, algorithm=algorithm, run=run, write=write, seed=seed)
        for seed, (algorithm, entries) in enumerate(shapes, start=1000 * write)
    ]


def flipped_bits(rng: random.Random, made: Sample) -> bytes:
    data = bytearray(made.data)
    for _ in range(rng.choice((1, 1, 1, 2, 8, 100))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def flipped_bit_in_the_text(rng: random.Random, made: Sample) -> bytes:
    data = bytearray(made.data)
    data[rng.randrange(8 + len(text_of(made.data)))] ^= 1 << rng.randrange(8)
    return bytes(data)


def overwritten(rng: random.Random, made: Sample) -> bytes:
    at, length = rng.randrange(len(made.data)), rng.choice((1, 8, 100, 512, UNIT))
    run = rng.choice((rng.randbytes(length), bytes(length), b"\xff" * length, made.data[:length]))
    return (made.data[:at] + run + made.data[at + length :])[: len(made.data)]


def lost_blocks(rng: random.Random, made: Sample) -> bytes:
    """As after a crash: some blocks of the drive never arrived."""
    data = bytearray(made.data)
    for at in range(0, len(data), 512):
        if rng.random() < 0.3:
            data[at : at + 512] = bytes(512)
    return bytes(data)


def swapped_units(rng: random.Random, made: Sample) -> bytes:
    units = [made.data[at : at + UNIT] for at in range(0, len(made.data), UNIT)]
    a, b = rng.randrange(len(units)), rng.randrange(len(units))
    units[a], units[b] = units[b], units[a]
    return b"".join(units)


def truncated(rng: random.Random, made: Sample) -> bytes:
    left = rng.randrange(len(made.data))
    return made.data[: rng.choice((left, left // UNIT * UNIT, left % 64))]


def grown(rng: random.Random, made: Sample) -> bytes:
    more = rng.choice((1, 8, 511, UNIT, rng.randrange(1, 3 * UNIT)))
    at = rng.choice((len(made.data), rng.randrange(len(made.data))))
    return made.data[:at] + rng.choice((bytes(more), rng.randbytes(more))) + made.data[at:]


def another_length(rng: random.Random, made: Sample) -> bytes:
    near = (UNIT - 8, 2 * UNIT - 8, len(made.data) - 8, len(made.data) + UNIT - 8, 100_000_000, 99_999_736)
    length = rng.choice((*near, rng.getrandbits(64), rng.getrandbits(20), 0, 2**63, 2**64 - 8, 2**64 - 1))
    return length.to_bytes(8, "little") + made.data[8:]


def anothers_data(rng: random.Random, made: Sample) -> bytes:
    """This header before the data of the same record of another run, in part or in whole."""
    other = rng.choice([other for other in OTHERS if len(other.data) == len(made.data)])
    at = rng.randrange(made.layout.header_bytes, len(made.data), UNIT)
    return made.data[:at] + other.data[at:]


def random_bytes(rng: random.Random, made: Sample) -> bytes:
    data = rng.randbytes(rng.choice((0, 1, 7, 8, 9, 100, UNIT, 2 * UNIT, rng.randrange(5 * UNIT))))
    start = rng.choice((b"", (UNIT - 8).to_bytes(8, "little"), made.data[:8], made.data[: rng.randrange(200)]))
    return start + data[len(start) :]


def another_record(rng: random.Random, made: Sample) -> bytes:
    return rng.choice(OTHERS).data


def _with_text(made: Sample, text: bytes) -> bytes:
    return forged(text) + made.data[made.layout.header_bytes :]


def changed_text(rng: random.Random, made: Sample) -> bytes:
    text = bytearray(text_of(made.data))
    for _ in range(rng.choice((1, 1, 1, 2, 20))):
        at = rng.randrange(len(text))
        change = rng.randrange(4)
        if change == 0:
            text[at] = rng.randrange(256)
        elif change == 1:
            text[at] = rng.choice(b'"[]{}:,0123456789-. \\eE\n\t')
        elif change == 2:
            text[at:at] = rng.choice((b" ", b"0", b"-", b"\xff", b"\xc3\x28", b"\\ud800", b"\n", b"\0", b'"', b"9"))
        else:
            del text[at]
    return _with_text(made, bytes(text))


def odd_number(rng: random.Random, made: Sample) -> bytes:
    """A number of a shape or an offset is something else."""
    text = text_of(made.data).decode()
    number = rng.choice(list(re.finditer(r"(?<=[\[,])\d+(?=[\],])", text)))
    odd = rng.choice((*ODD_NUMBERS, *(str(odd) for odd in ODD_INTS), "9" * 5000, number[0] + ".0"))
    return _with_text(made, (text[: number.start()] + odd + text[number.end() :]).encode())


def deep(rng: random.Random, made: Sample) -> bytes:
    text = text_of(made.data).decode()
    value = rng.choice(list(re.finditer(r'(?<=:)("[^"]*"|\[[^\]]*\])', text)))
    depth = rng.choice((1, 10, 900, 1000, 5000, 100_000 if rng.random() < 0.1 else 100))
    opening, closing = rng.choice((("[", "]"), ('{"":', "}")))
    nested = opening * depth + value[0] + closing * rng.choice((depth, depth, 0))
    return _with_text(made, (text[: value.start()] + nested + text[value.end() :]).encode())


def key_twice(rng: random.Random, made: Sample) -> bytes:
    text = text_of(made.data).decode()
    pairs = list(re.finditer(r'"[^"]*":("[^"]*"|\[[^\]]*\]|\{[^{}]*\})', text))
    pair, other = rng.choice(pairs), rng.choice(pairs)
    value = rng.choice((pair[1], other[1], '""', "[0,0]"))
    key = pair[0][: -len(pair[1])]
    at = rng.choice((pair, other)).start()
    return _with_text(made, (text[:at] + key + value + "," + text[at:]).encode())


def _spots(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [spot for key, value in pairs for spot in ((tree, key), *_spots(value))]


def changed_values(rng: random.Random, made: Sample) -> bytes:
    """Values of the header replaced, exchanged, taken out or put in anew."""
    tree = tree_of(made.data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        spots = _spots(tree)
        if not spots:
            break
        (place, key), (other, name) = rng.choice(spots), rng.choice(spots)
        change = rng.randrange(5)
        if change == 0:
            place[key] = rng.choice(
                (*ODD_TEXTS, *ODD_INTS, 0.0, 1.5, True, None, [], {}, float("nan"), float("inf"))
            )
        elif change == 1:
            # Copies: a value that came to lie within itself could not be written.
            place[key], other[name] = json.loads(json.dumps([other[name], place[key]]))
        elif change == 2:
            del place[key]
        elif change == 3 and isinstance(place, dict):
            place[rng.choice((*ODD_TEXTS, "dtype.x", "checksum.x", "x"))] = json.loads(json.dumps(other[name]))
        elif isinstance(place, dict) and len(place) > 1:
            place[key] = place.pop(key)
    return _with_text(made, json.dumps(tree, separators=(",", ":")).encode())


def other_header_values(rng: random.Random, made: Sample) -> bytes:
    """Whole records but for the data: a counter, the run or a name is another."""
    tree = tree_of(made.data)
    about = tree["__metadata__"]
    key = rng.choice(("run", "number", "write", "step", "kind", "algorithm"))
    about[key] = rng.choice(("run-8", "0", "17", "optimizer", "crc32", "xxh3_64", "none", "9" * 18))
    return _with_text(made, json.dumps(tree, separators=(",", ":")).encode())


def another_layout(rng: random.Random, made: Sample) -> bytes:
    """The text with other white space, or more of it behind."""
    tree = tree_of(made.data)
    text = rng.choice(
        (
            json.dumps(tree).encode(),
            json.dumps(tree, indent=rng.randrange(3)).encode(),
            json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode(),
            json.dumps(tree, separators=(",", ":"), sort_keys=True).encode(),
            text_of(made.data) + rng.choice((b"\n", b"\0", b"}", b" " * UNIT)),
            b" " + text_of(made.data),
            b"\xef\xbb\xbf" + text_of(made.data),
            text_of(made.data).decode().encode("utf-16-le"),
        )
    )
    return _with_text(made, text)


OTHERS = samples(run="run-8", write=6)
DAMAGE: dict[str, Mutation] = {
    function.__name__: function
    for function in (
        *(flipped_bits, flipped_bit_in_the_text, overwritten, lost_blocks, swapped_units, truncated, grown),
        *(another_length, anothers_data, random_bytes),
    )
}
FORGERIES: dict[str, Mutation] = {
    function.__name__: function
    for function in (
        *(another_record, changed_text, odd_number, deep, key_twice, changed_values, other_header_values),
        another_layout,
    )
}
