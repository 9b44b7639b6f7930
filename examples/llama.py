"""Llama 2 in plain PyTorch modules, in its published shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 32000


@dataclass(frozen=True)
class Shape:
    """hidden: the width of the feed-forward network."""

    layers: int
    width: int
    heads: int
    hidden: int


SHAPES = {
    "7b": Shape(layers=32, width=4096, heads=32, hidden=11008),
    "13b": Shape(layers=40, width=5120, heads=40, hidden=13824),
}


class Llama(nn.Module):
    """Predicts the next token. tokens: the longest sequence. Weights have torch's default dtype and device."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        depth = shape.width // shape.heads
        speeds = 10000.0 ** -(torch.arange(0, depth, 2, dtype=torch.float32) / depth)
        angles = torch.outer(torch.arange(tokens, dtype=torch.float32), speeds).repeat(1, 2)
        dtype = self.head.weight.dtype
        self.register_buffer("cosines", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sines", angles.sin().to(dtype), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of the targets, in nats. Both have the shape (batch, tokens)."""
        turn = self.cosines[: tokens.shape[1]], self.sines[: tokens.shape[1]]
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, turn)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Layer(nn.Module):
    """Causal attention with rotary positions, and SwiGLU, each behind a norm and around a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.RMSNorm(shape.width)
        self.query, self.key, self.value, self.output = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(4)
        )
        self.feed_forward_norm = nn.RMSNorm(shape.width)
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.output(self.attend(self.attention_norm(x), turn))
        hidden = self.feed_forward_norm(x)
        return x + self.down(functional.silu(self.gate(hidden)) * self.up(hidden))

    def attend(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        result = functional.scaled_dot_product_attention(
            rotate(query, turn), rotate(key, turn), value, is_causal=True
        )
        return result.transpose(1, 2).flatten(2)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the first half of each head against the second."""
    cosines, sines = turn
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat([-second, first], -1) * sines
