"""python -m tests.spill.fuzz_records: reads many wrong files, and shows what became of them.

Each must give CorruptRecord or the very tensors that are in it. The first that does not ends the run, and is named
by the seed and the number that make it again.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import zlib
from collections import Counter
from pathlib import Path

import xxhash
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors import deserialize

import tests.spill.without_torch  # noqa: F401
from tests.spill.mutations import DAMAGE, FORGERIES, samples
from tests.spill.records import Sample
from tiered_mem.errors import CorruptRecord
from tiered_mem.spill.reader import read_header, read_record

REFUSED, RIGHT, ANOTHER = "refused", "the right tensors", "another whole record"
SUMS = {
    "crc32": lambda data: f"{zlib.crc32(data):08x}",
    "xxh3_64": lambda data: f"{xxhash.xxh3_64_intdigest(data):016x}",
}
MUTATIONS = {**DAMAGE, **FORGERIES}


class WrongAnswer(Exception):
    """The reader took something for what it is not, or did not take what it should."""


def outcome(made: Sample, kind: str, data: bytes, path: Path) -> str:
    """What the reader makes of `data`, which a mutation of that kind made out of a record. Raises WrongAnswer."""
    path.write_bytes(data)
    try:
        header = read_header(path)
        arrays = read_record(path)
    except CorruptRecord as error:
        if _means_the_same(made, data):
            raise WrongAnswer(f"a sound record was refused: {error}") from error
        return REFUSED
    # safetensors has a parser of its own, which knows nothing of what the reader does.
    stored = {name: bytes(tensor["data"]) for name, tensor in deserialize(data) if not name.startswith("__pad__.")}
    read = {name: array.tobytes() for name, array in arrays.items()}
    if read != stored or list(read) != [entry.name for entry in header.entries]:
        raise WrongAnswer("the reader and safetensors read other tensors")
    for entry in header.entries:
        if header.algorithm != "none" and SUMS[header.algorithm](read[entry.name]) != entry.checksum:
            raise WrongAnswer(f"{entry.name!r} does not have its checksum")
    if header == made.header:
        if header.algorithm != "none" and [*read.values()] != [*made.contents]:
            raise WrongAnswer("other tensors than were written")
        return RIGHT
    if kind not in FORGERIES:
        raise WrongAnswer(f"damage was read as another record: {header}")
    return ANOTHER


def _means_the_same(made: Sample, data: bytes) -> bool:
    layout = made.layout
    return (
        len(data) == len(made.data)
        and data.startswith(made.data[: layout.header_bytes])
        and all(
            data[offset : offset + len(content)] == content
            for offset, content in zip(layout.offsets, made.contents, strict=True)
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    arguments = parser.parse_args()
    console, made, counts = Console(), samples(), Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record"
        for number in track(range(arguments.first, arguments.first + arguments.inputs), console=console):
            rng = random.Random(f"{arguments.seed} {number}")
            kind, chosen = rng.choice([*MUTATIONS]), rng.choice(made)
            try:
                counts[kind, outcome(chosen, kind, MUTATIONS[kind](rng, chosen), path)] += 1
            except Exception:
                console.print(
                    f"{kind}, again with: --seed {arguments.seed} --first {number} --inputs 1", style="red"
                )
                raise
    console.print(_table(counts))


def _table(counts: Counter[tuple[str, str]]) -> Table:
    table = Table("what was done", show_footer=True)
    for column in (REFUSED, RIGHT, ANOTHER):
        total = sum(count for (_, found), count in counts.items() if found == column)
        table.add_column(column, justify="right", footer=f"{total:,}")
    table.columns[0].footer = f"{counts.total():,} inputs"
    for kind in MUTATIONS:
        table.add_row(kind.replace("_", " "), *(f"{counts[kind, column.header]:,}" for column in table.columns[1:]))
    return table


if __name__ == "__main__":
    main()
