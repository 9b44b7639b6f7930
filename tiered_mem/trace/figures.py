"""The sums of a trace, and how they are told."""

from __future__ import annotations

from dataclasses import dataclass

from ..sizes import format_bytes, format_seconds
from .records import layer_name


@dataclass(frozen=True, slots=True)
class Figures:
    """All since the trace began. stalls: the longest first. host_waits: of the host itself, for room."""

    offload: Total
    reload: Total
    stalls: tuple[Stall, ...]
    host_waits: Total
    writes: Total
    reads: Total


@dataclass(slots=True)
class Total:
    """Copies, files or waits of one kind, and their seconds together, some of which ran side by side.

    blocks, stalled: of copies, how many blocks they moved, and how many seconds compute streams waited for them.
    """

    count: int = 0
    seconds: float = 0.0
    nbytes: int = 0
    blocks: int = 0
    stalled: float = 0.0

    def add(self, seconds: float, nbytes: int = 0, blocks: int = 0) -> None:
        self.count += 1
        self.seconds += seconds
        self.nbytes += nbytes
        self.blocks += blocks

    @property
    def hidden(self) -> float | None:
        """The share of the copying that nobody waited for, from 0 to 1; None where there was none."""
        return min(1.0, max(0.0, 1 - self.stalled / self.seconds)) if self.seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Stall:
    """How many seconds compute streams waited for copies in a layer; None is before the first one."""

    why: str
    layer: int | None
    backward: bool
    seconds: float


def summary_rows(figures: Figures) -> list[tuple[str, str]]:
    """The figures for people, as labels and values."""
    stalls = [
        f"{format_seconds(s.seconds)} {s.why} in {layer_name(s.layer, s.backward)}" for s in figures.stalls[:3]
    ]
    waited = format_seconds(sum(stall.seconds for stall in figures.stalls))
    rows = [
        ("offload copies", _told(figures.offload)),
        ("reload copies", _told(figures.reload)),
        ("compute waited for them", f"{waited}: {', '.join(stalls)}" if stalls else "never"),
        ("host waited for room", format_seconds(figures.host_waits.seconds)),
    ]
    files = (("files written", figures.writes), ("files read", figures.reads))
    return rows + [(name, _rate(each)) for name, each in files if each.count]


def _rate(files: Total) -> str:
    each = f"{files.nbytes / files.seconds / 1e9:.2f} GB/s each" if files.seconds > 0 else "in no time"
    return f"{files.count}, {format_bytes(files.nbytes)}, {each}"


def _told(copies: Total) -> str:
    if copies.hidden is None:
        return "none"
    moved = f"{format_bytes(copies.nbytes)} in {copies.count} groups"
    return f"{moved}, {format_seconds(copies.seconds)}, {100 * copies.hidden:.0f} % hidden"
