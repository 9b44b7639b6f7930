"""How fast copies were, from when each of them ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import fsum
from typing import NamedTuple

# A copy was alone if others ran the other way for less than this share of it.
_ALONE = 0.1
# Copies that were alone tell the rate if they have this share of the bytes, and those that were not the share that
# each direction has beside the other, if they have it.
_ENOUGH = 0.1


class CopySpan(NamedTuple):
    """A copy: when it began and ended, in seconds, and its bytes."""

    begin: float
    end: float
    nbytes: int


def rates(out: Sequence[CopySpan], back: Sequence[CopySpan]) -> tuple[float, float, float]:
    """The bytes a second out and back, of copies that were alone, and each direction's share beside the other.

    Where too few were alone a rate is that of all; 0 where there were none. The share is 0 where it is not known.

    out, back: copies in each direction. Those of one direction run one after another, and come in that order.
    """
    ways = [(out, list(_beside(out, back))), (back, list(_beside(back, out)))]
    alone = [_rate_alone(spans, beside) for spans, beside in ways]
    found = [known or _rate(spans) for known, (spans, _) in zip(alone, ways, strict=True)]
    # Of the seconds beside others: as many as there were, and as many as the bytes would have taken alone.
    took = would = 0.0
    for rate, (spans, beside) in zip(alone, ways, strict=True):
        shared = [(span, share) for span, share in zip(spans, beside, strict=True) if share > _ALONE]
        if rate and _sum(span for span, _ in shared) >= _ENOUGH * _sum(spans):
            took += fsum(share * (span.end - span.begin) for span, share in shared)
            would += fsum(span.nbytes / rate - (1 - share) * (span.end - span.begin) for span, share in shared)
    return found[0], found[1], min(1.0, max(0.05, would / took)) if took > 0 else 0.0


def _beside(spans: Sequence[CopySpan], others: Sequence[CopySpan]) -> Iterator[float]:
    """Of each copy's time, the share in which one of the others ran."""
    first = 0
    for begin, end, _ in spans:
        while first < len(others) and others[first].end <= begin:
            first += 1
        shared, number = 0.0, first
        while number < len(others) and others[number].begin < end:
            shared += min(end, others[number].end) - max(begin, others[number].begin)
            number += 1
        yield min(1.0, shared / (end - begin)) if end > begin else 0.0


def _rate_alone(spans: Sequence[CopySpan], beside: Sequence[float]) -> float:
    """0 where too few were."""
    alone = [span for span, share in zip(spans, beside, strict=True) if share <= _ALONE]
    return _rate(alone) if _sum(alone) >= _ENOUGH * _sum(spans) else 0.0


def _rate(spans: Sequence[CopySpan]) -> float:
    seconds = fsum(span.end - span.begin for span in spans)
    return _sum(spans) / seconds if seconds > 0 else 0.0


def _sum(spans: Sequence[CopySpan] | Iterator[CopySpan]) -> int:
    return sum(span.nbytes for span in spans)
