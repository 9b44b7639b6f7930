"""A small byte-level GPT and the text it is trained on."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional


class GPT(nn.Module):
    """Predicts the next byte. Tokens of shape (batch, context) in, logits of shape (batch, context, 256) out."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads, context) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of the targets, in nats."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Layer(nn.Module):
    """Causal self-attention and a feed-forward network, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.register_buffer("future", torch.ones(context, context, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.projection(self.attend(self.qkv(self.attention_norm(x))))
        return x + self.down(functional.gelu(self.up(self.feed_forward_norm(x))))

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        q, k, v = qkv.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * (width // self.heads) ** -0.5) @ k.transpose(-1, -2)
        scores = scores.masked_fill(self.future[:length, :length], float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)


def standard_library() -> torch.Tensor:
    """The sources of Python's standard library, as one tensor of bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    return torch.frombuffer(
        bytearray(b"".join(p.read_bytes() for p in sorted(folder.glob("*.py")))), dtype=torch.uint8
    )


def batches(
    text: torch.Tensor, *, batch: int, context: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless random pieces of the text: tokens, and as targets the bytes after them, of shape (batch, context)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context, (batch,), generator=generator)
        pieces = torch.stack([text[start : start + context + 1] for start in starts]).long()
        yield pieces[:, :-1], pieces[:, 1:]
