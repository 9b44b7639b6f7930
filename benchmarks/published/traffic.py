"""What the traffic between cards adds to a step: plain formulas, for no link between cards is modelled here.

A collective is a ring: (n - 1) / n of its bytes over one card's bandwidth.
"""

from dataclasses import dataclass

from benchmarks.published.rows import Row
from benchmarks.published.shapes import Shape


@dataclass(frozen=True)
class Links:
    """Bytes per second of one card in a ring of eight, and of a pair of cards, one way."""

    ring: float
    pair: float


# NVIDIA/nccl-tests #149 and NVIDIA/nccl #1455. A pair of 910B: 26.2 GB/s measured (public notes on one server); the
# ring of eight is assumed, three quarters of seven such links.
LINKS = {"a100": Links(230e9, 230e9), "h100": Links(370e9, 370e9), "910b2": Links(137e9, 26.2e9)}


@dataclass(frozen=True)
class Seconds:
    """What a card computes in a step: all micro batches, one of them, and the optimizer's update."""

    micro_batches: float
    micro_batch: float
    update: float


def step_seconds(row: Row, shape: Shape, last: Seconds, others: Seconds | None) -> float:
    """Of a whole step. last: the stage with the loss, which is the slowest; others: each one before it.

    - FSDP gathers weights twice (2 bytes each) and scatters gradients (4 bytes, float32) in each micro batch,
      behind what is computed: only what is longer than that counts.
    - A sharded optimizer scatters float32 gradients (Megatron) or bfloat16 ones, and gathers bfloat16 weights,
      once a step. The first is hidden if the row overlaps it; the second is not.
    - A pipeline is filled and drained by one micro batch of the stages before the last (the bubble), and the last
      one waits for one activation and one gradient of each micro batch.
    """
    links, share = LINKS[row.chip], 1 - row.pipeline / row.cards
    weights = parameters(row, shape)
    seconds = last.micro_batches + last.update
    if row.optimizer == "fsdp":
        seconds += row.accumulate * max(0, 8 * weights * share / links.ring - last.micro_batch)
    if row.optimizer in ("shares", "megatron"):
        scattered = 0 if row.overlaps else (4 if row.optimizer == "megatron" else 2)
        seconds += (scattered + 2) * weights * share / links.ring
    if others is not None:
        sent = 2 * row.micro_batch * row.sequence * shape.hidden
        seconds += (row.pipeline - 1) * others.micro_batch + row.accumulate * 2 * sent / links.pair
    return seconds


def parameters(row: Row, shape: Shape) -> float:
    """Of one stage, without norms and biases."""
    keys = shape.key_heads * shape.head_size
    block = 2 * shape.hidden * (shape.hidden + keys) + (3 if shape.gated else 2) * shape.hidden * shape.feed_forward
    return shape.layers / row.pipeline * block + (2 if row.pipeline == 1 else 1) * shape.vocabulary * shape.hidden
