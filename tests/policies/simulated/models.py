"""Training steps of seven models, worked out from their shapes.

A matrix product takes its operations over the device's rate, all else its bytes over the memory's; backward takes
twice as long as forward, and two and a half times for attention. Numbers have two bytes. Nothing was measured.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.policies.simulated.steps import Layer, Op, Step, build, one_forward_one_backward
from tiered_mem.policies.planning import Link


@dataclass(frozen=True)
class Hardware:
    """flops: operations each second that large matrix products reach. memory: bytes each second."""

    name: str
    flops: float
    memory: float
    link: Link

    def product(self, flops: float, saves: Sequence[int], out: int) -> Op:
        return Op((flops / self.flops, 2 * flops / self.flops), saves, (out, 2 * out))

    def bytewise(self, nbytes: float, saves: Sequence[int], out: int) -> Op:
        return Op((nbytes / self.memory, 2 * nbytes / self.memory), saves, (out, out))

    def attention(self, flops: float, saves: Sequence[int], out: int) -> Op:
        return Op((flops / self.flops, 2.5 * flops / self.flops), saves, (out, 2 * out))


def _link(rate: float) -> Link:
    return Link(rate, rate, 0.9, 5e-6)


HARDWARE = (
    Hardware("H200, 55 GB/s", 445e12, 3.3e12, _link(55e9)),
    Hardware("910B, 50 GB/s", 144e12, 1.1e12, _link(50e9)),
    Hardware("910B, 25 GB/s", 144e12, 1.1e12, _link(25e9)),
    Hardware("910B, 10 GB/s", 144e12, 1.1e12, _link(10e9)),
)


def llama_8b(on: Hardware) -> Step:
    head = 2 * 4096 * 128256 * 8192 / on.flops, 6 * 128256 * 8192 // 4
    return build([_llama_layer(on, 4096, 14336, 4, 8192)] * 32, [_gradients(4096, 14336, 4)] * 32, head=head)


def llama_70b(on: Hardware) -> Step:
    """Twenty of its layers, with gradients over eight devices."""
    head = 2 * 8192 * 128256 * 4096 / on.flops, 6 * 128256 * 4096 // 4
    return build([_llama_layer(on, 8192, 28672, 8, 4096)] * 20, [_gradients(8192, 28672, 8) // 8] * 20, head=head)


def mixture(on: Hardware) -> Step:
    """Eight experts, of which a token takes two; how many tokens an expert gets is random."""
    rng = random.Random(0)
    h, f, tokens = 4096, 3584, 4096
    layers: list[Layer] = []
    for _ in range(32):
        ops = _llama_layer(on, h, f, 4, tokens)[:6]
        weights = [rng.gammavariate(3, 1) for _ in range(8)]
        for weight in weights:
            mine = int(2 * tokens * weight / sum(weights))
            ops.append(on.product(4 * h * f * mine, [2 * h * mine], 4 * f * mine))
            ops.append(on.bytewise(8 * f * mine, [2 * f * mine] * 3, 2 * f * mine))
            ops.append(on.product(2 * h * f * mine, [2 * f * mine], 2 * h * mine))
        layers.append(ops)
    gradients = 2 * (h * h * 5 // 2 + 3 * h * f * 8) // 8
    return build(layers, [gradients] * 32, head=(2 * h * 32000 * tokens / on.flops, 6 * 32000 * tokens // 4))


def vit_h(on: Hardware) -> Step:
    h, f, sequence = 1280, 5120, 257
    tokens = sequence * 128
    layer = [
        on.bytewise(4 * h * tokens, [2 * h * tokens], 2 * h * tokens),
        on.product(6 * h * h * tokens, [2 * h * tokens], 6 * h * tokens),
        on.attention(4 * tokens * sequence * h / 0.6, [6 * h * tokens, 2 * h * tokens], 2 * h * tokens),
        on.product(2 * h * h * tokens, [], 2 * h * tokens),
        on.bytewise(4 * h * tokens, [2 * h * tokens], 2 * h * tokens),
        on.product(2 * h * f * tokens, [2 * h * tokens], 2 * f * tokens),
        on.bytewise(4 * f * tokens, [2 * f * tokens], 2 * f * tokens),
        on.product(2 * h * f * tokens, [2 * f * tokens], 2 * h * tokens),
    ]
    return build([layer] * 32, [24 * h * h] * 32)


def conv(on: Hardware) -> Step:
    """Four stages, whose activations halve from each to the next while the compute of a layer stays the same."""
    layers: list[Layer] = []
    seconds = 2 * 256 * 56 * 56 * 64 * 64 * 26 * 2 * 0.4 / on.flops
    for stage, count in enumerate((3, 4, 12, 4)):
        whole = 256 * 56 * 56 * 256 * 2 >> stage
        ops: list[Op] = []
        for nbytes in (whole, whole // 2, whole // 2, whole):
            ops.append(Op((seconds, 2 * seconds), [nbytes], (nbytes, nbytes)))
            ops.append(on.bytewise(2 * nbytes, [nbytes] if len(ops) == 7 else [], nbytes))
        layers += [ops] * count
    return build(layers, [8 << 20] * len(layers))


def hybrid(on: Hardware) -> Step:
    """Attention in each fourth layer; the others are state space layers, with more to save and less to compute."""
    h, f, tokens = 4096, 14336, 8192
    wide = 2 * h
    full = _llama_layer(on, h, f, 4, tokens)
    state_space = [
        full[0],
        on.product(4 * h * wide * tokens, [2 * h * tokens], 4 * wide * tokens),
        on.bytewise(20 * wide * tokens, [2 * wide * tokens] * 3, 2 * wide * tokens),
        on.product(2 * h * wide * tokens, [2 * wide * tokens], 2 * h * tokens),
    ]
    layers = [full if i % 4 == 3 else state_space + full[5:] if i % 2 else state_space for i in range(24)]
    return build(layers, [_gradients(h, f, 4) // 2] * 24)


def pipeline(on: Hardware, microbatches: int = 8) -> Step:
    """A stage of ten large layers: one forward and one backward in turn, after four forwards."""
    order = one_forward_one_backward(microbatches, min(4, microbatches))
    return build([_llama_layer(on, 8192, 28672, 8, 4096)] * 10, [_gradients(8192, 28672, 8) // 8] * 10, order)


MODELS: dict[str, Callable[[Hardware], Step]] = {
    "llama-8B": llama_8b,
    "llama-70B, 20 layers": llama_70b,
    "mixture of experts": mixture,
    "ViT-H": vit_h,
    "conv, 4 stages": conv,
    "hybrid": hybrid,
    "1F1B, 8 microbatches": pipeline,
}


def _llama_layer(on: Hardware, h: int, f: int, groups: int, tokens: int) -> list[Op]:
    """A layer with causal attention, whose keys and values are shared by `groups` heads."""
    wide, narrow, hidden = 2 * h * tokens, 2 * h * tokens // groups, 2 * f * tokens
    return [
        on.bytewise(2 * wide, [wide], wide),
        on.product(2 * h * h * (1 + 2 / groups) * tokens, [wide], wide + 2 * narrow),
        on.bytewise(2 * (wide + narrow), [], wide + narrow),
        on.attention(2 * tokens * tokens * h / 0.8, [wide, narrow, narrow, wide], wide),
        on.product(2 * h * h * tokens, [], wide),
        on.bytewise(2 * wide, [wide], wide),
        on.product(4 * h * f * tokens, [wide], 2 * hidden),
        on.bytewise(2 * hidden, [hidden], hidden),
        on.bytewise(3 * hidden, [hidden, hidden], hidden),
        on.product(2 * h * f * tokens, [hidden], wide),
    ]


def _gradients(h: int, f: int, groups: int) -> int:
    return 2 * (h * h * 2 + 2 * h * h // groups + 3 * h * f)
