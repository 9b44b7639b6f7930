"""The modelled link of a card, alone and beside others, as arguments of a `Link`; and the ways to plan for it."""

from __future__ import annotations

# Those of emulator/ascend_emulator/servers/atlas-a2.toml.
OUT, BACK, BOTH, LATENCY = 27.6e9, 24.8e9, 0.9, 5e-6

PLAIN, MEASURED, SHARE, WHOLE = "plain", "measured", "told its share", "told the whole link"
WAYS = (MEASURED, SHARE, WHOLE)


def alone() -> dict[str, float]:
    return {"out": OUT, "back": BACK, "both": BOTH, "latency": LATENCY}


def shared(ranks: int, memory: float) -> dict[str, float]:
    """What one of so many has where all copy at once. memory: the rate of the host's, in bytes a second."""
    part = memory / ranks
    out, back = min(OUT, part), min(BACK, part)
    return {"out": out, "back": back, "both": min(BOTH, part / (out + back)), "latency": LATENCY}
