"""A small Llama: rotary positions, RMSNorm, SwiGLU, and causal attention in which query heads share keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, KEY_HEADS, CONTEXT = 64, 32, 4, 2, 16
DEPTH = WIDTH // HEADS


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Turns the first half of each head against the second, as Hugging Face's models do."""
    both = torch.cat([angles, angles], -1)
    first, second = x.chunk(2, -1)
    return x * both.cos().to(x.dtype) + torch.cat([-second, first], -1) * both.sin().to(x.dtype)


def rotate_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """Turns pairs of neighbours as complex numbers, as Meta's models do."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    turns = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, complex_numbers: bool) -> None:
        super().__init__()
        self.rotate = rotate_pairs if complex_numbers else rotate_halves
        self.query = nn.Linear(WIDTH, HEADS * DEPTH, bias=False)
        self.key = nn.Linear(WIDTH, KEY_HEADS * DEPTH, bias=False)
        self.value = nn.Linear(WIDTH, KEY_HEADS * DEPTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, DEPTH)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        result = F.scaled_dot_product_attention(
            self.rotate(query, angles), self.rotate(key, angles), value, is_causal=True, enable_gqa=True
        )
        output: Tensor = self.output(result.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    def __init__(self, complex_numbers: bool) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(complex_numbers)
        self.gate, self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.first_norm(x), angles)
        hidden = self.second_norm(x)
        output: Tensor = x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return output


class Llama(nn.Module):
    def __init__(self, complex_numbers: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(complex_numbers) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy."""
        speeds = 10000.0 ** -(torch.arange(0, DEPTH, 2, device=tokens.device) / DEPTH)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), speeds)
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, angles)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
