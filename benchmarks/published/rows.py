"""The published steps: rows.toml, read and checked."""

import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_FILE = Path(__file__).with_name("rows.toml")


@dataclass(frozen=True)
class Row:
    """One published step, and what must be known to do it again.

    attention: the rate of the attention kernel that was used over that in the chip's file.
    fitted: whether the chip's factor is made from it, too; else it only says how good that is.
    milliseconds: of one step, as published or as follows from the published tokens per second and card.
    """

    name: str
    chip: str
    source: str
    milliseconds: float
    kind: str = "decoder"
    model: str = ""
    kernels: str = "fused"
    optimizer: str = "plain"
    sequence: int = 0
    document: int = 0
    micro_batch: int = 1
    accumulate: int = 1
    cards: int = 1
    pipeline: int = 1
    recompute: bool = False
    attention: float = 1
    overlaps: bool = True
    fitted: bool = True

    @property
    def host_bound(self) -> bool:
        """Whether the host takes longer to launch the kernels than the device to compute them."""
        return self.kind != "decoder"

    @property
    def tokens(self) -> int:
        """Of one step and card."""
        return self.micro_batch * self.sequence * self.accumulate // self.pipeline


def read_rows(path: Path = _FILE) -> list[Row]:
    """All rows of a file, in its order. Raises ValueError for what is no row."""
    rows = []
    for group in tomllib.loads(path.read_text())["group"]:
        common = {key: value for key, value in group.items() if key != "row"}
        rows += [_row(common | row) for row in group["row"]]
    return rows


def _row(given: dict[str, object]) -> Row:
    rate = given.pop("tokens_per_s", None)
    try:
        row = Row(**({"milliseconds": 0.0} | given))  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"{given.get('name', given)}: {error}") from None
    if isinstance(rate, int | float):
        row = Row(**(row.__dict__ | {"milliseconds": 1e3 * row.tokens / rate}))
    if not row.milliseconds > 0:
        raise ValueError(f"{row.name}: neither milliseconds nor tokens_per_s")
    return row
