"""Allocation traces worked out from the shapes of models: what a host pool is asked when they train, tiered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

from benchmarks.recorded import Allocated, Deallocated, Marked, Operation
from tiered_mem.allocators.base import round_up

MIB = 1 << 20
STEPS = 60
# What the offload context and the store do by themselves: smaller tensors stay on the device, and what leaves
# together shares a lease of up to 8 MiB.
MIN_BYTES = MIB
LEASE_BYTES = 8 * MIB


@dataclass(frozen=True)
class Shape:
    """A transformer with gated feed-forward layers, in bfloat16, whose attention saves no scores."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int

    def saved_by_a_layer(self, tokens: int) -> list[int]:
        """The bytes of each tensor that a layer saves for its backward, in the order in which they are saved."""
        wide, kv, ffn = (2 * tokens * width for width in (self.hidden, self._kv_width, self.ffn))
        scale, log_sum = 4 * tokens, 4 * tokens * self.heads
        attention = [wide, scale, wide, wide, kv, kv, wide, log_sum]  # input, norm, q, k, v, output
        feed_forward = [wide, scale, wide, ffn, ffn, ffn, ffn]  # input, norm, gate, its activation, up, product
        return attention + feed_forward

    def weights(self) -> list[int]:
        """The number of elements of each weight."""
        square, kv, ffn = (self.hidden * width for width in (self.hidden, self._kv_width, self.ffn))
        layer = [square, kv, kv, square, ffn, ffn, ffn, self.hidden, self.hidden]
        return [self.vocab * self.hidden, *self.layers * layer, self.hidden, self.vocab * self.hidden]

    @property
    def _kv_width(self) -> int:
        return self.hidden // self.heads * self.kv_heads


LLAMA_7B = Shape(layers=32, hidden=4096, ffn=11008, heads=32, kv_heads=32, vocab=32000)
QWEN_7B = Shape(layers=28, hidden=3584, ffn=18944, heads=28, kv_heads=4, vocab=152064)


def generated_traces(seed: int = 0) -> dict[str, Callable[[], Iterator[Operation]]]:
    """The traces by name, each made anew when it is called, and always the same for the same seed."""
    six = [512, 1024, 2048, 4096, 6144, 8192]
    return {
        "Llama-7B, 1 x 4096": lambda: training(LLAMA_7B, STEPS * [4096]),
        "Llama-7B, 2 x 4096": lambda: training(LLAMA_7B, STEPS * [2 * 4096]),
        "Llama-7B, 3 x 4096": lambda: training(LLAMA_7B, STEPS * [3 * 4096]),
        "Llama-7B, 4 x 4096": lambda: training(LLAMA_7B, STEPS * [4 * 4096]),
        "Qwen-7B, 1 x 4096": lambda: training(QWEN_7B, STEPS * [4096]),
        "Llama-7B, six lengths": lambda: training(LLAMA_7B, Random(seed).choices(six, k=STEPS)),
        "Llama-7B, free lengths": lambda: training(LLAMA_7B, free_lengths(seed)),
        "Qwen-7B, free lengths": lambda: training(QWEN_7B, free_lengths(seed)),
        "Qwen-7B, Adam": lambda: training(QWEN_7B, STEPS * [4096], adam=True),
        "Qwen-7B, Adam, free lengths": lambda: training(QWEN_7B, free_lengths(seed), adam=True),
    }


def free_lengths(seed: int) -> list[int]:
    """The tokens of each step: anything from 512 to 8192."""
    random = Random(seed)
    return [random.randint(512, 8192) for _ in range(STEPS)]


def training(shape: Shape, tokens: Iterable[int], *, adam: bool = False) -> Iterator[Operation]:
    """Steps of so many tokens each, in which all layers are offloaded, and come back from the last to the first.

    adam: before the first step come the optimizer's states, two of float32 for each weight together, the largest
        first.
    """
    numbers = count()
    if adam:
        for elements in sorted(shape.weights(), reverse=True):
            yield Allocated(next(numbers), 8 * elements)
    for step, length in enumerate(tokens):
        yield Marked(f"step {step}")
        leases = leases_for(size for size in shape.saved_by_a_layer(length) if size >= MIN_BYTES)
        layers = [[next(numbers) for _ in leases] for _ in range(shape.layers)]
        for layer in layers:
            yield from map(Allocated, layer, leases)
        for layer in reversed(layers):
            yield from map(Deallocated, layer)


def leases_for(sizes: Iterable[int]) -> Sequence[int]:
    """The sizes that the host tier asks its pool for, where blocks of these sizes leave together."""
    leases: list[int] = []
    group = 0
    for size in sizes:
        if group and group + size > LEASE_BYTES:
            leases.append(group)
            group = 0
        group += round_up(size)
    return [*leases, group] if group else leases
