"""A small GPT in two styles, for whole training steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, CONTEXT = 64, 32, 4, 16


class Attention(nn.Module):
    """Causal attention: by an explicit softmax and a mask, or fused."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH, bias=not fused)
        self.output = nn.Linear(WIDTH, WIDTH, bias=not fused)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.inputs(x).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            result = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
            later = torch.tril(torch.ones(length, length, device=x.device)) == 0
            result = scores.masked_fill(later, float("-inf")).softmax(-1) @ value
        output: Tensor = self.output(result.transpose(1, 2).reshape(batch, length, WIDTH))
        return output


class FeedForward(nn.Module):
    """GELU with biases, or SwiGLU without."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=not gated)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False) if gated else None
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=not gated)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = F.gelu(hidden) if self.gate is None else F.silu(self.gate(x)) * hidden
        output: Tensor = self.down(hidden)
        return output


class Block(nn.Module):
    def __init__(self, modern: bool) -> None:
        super().__init__()
        norm = nn.RMSNorm if modern else nn.LayerNorm
        self.first_norm, self.second_norm = norm(WIDTH), norm(WIDTH)
        self.attention, self.feed_forward = Attention(modern), FeedForward(modern)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first_norm(x))
        output: Tensor = x + self.feed_forward(self.second_norm(x))
        return output


class GPT(nn.Module):
    """modern: RMSNorm, SwiGLU and fused attention; else LayerNorm, GELU and an explicit softmax. Tied weights."""

    def __init__(self, modern: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(modern) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.05)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
