"""Models that see the same data in each step, so that their gradients have to be the same, bit for bit."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from benchmarks.llama_step import Block, rotary
from examples.gpt import GPT, batches, standard_library

HEAD = 32
LLAMA_HEAD = 128


class CheckedStep(ABC):
    """model: has its layers in `layers`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._right: list[Tensor] = []

    @abstractmethod
    def forward(self) -> Tensor:
        """The loss."""

    def remember(self) -> None:
        """The gradients that there are now are the right ones. They are kept on the host, pinned."""
        self._right = [grad.cpu().pin_memory() for grad in self._gradients()]

    def is_right(self) -> bool:
        """Whether the gradients that there are now are the right ones, bit for bit."""
        pairs = zip(self._gradients(), self._right, strict=True)
        return all(torch.equal(found, right.to(found.device)) for found, right in pairs)

    def _gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self.model.parameters() if weight.grad is not None]


class GptStep(CheckedStep):
    """The example's GPT in float32. width: a multiple of 32, which a head has."""

    def __init__(self, kind: str, *, layers: int, width: int, context: int, batch: int) -> None:
        torch.manual_seed(0)
        super().__init__(GPT(layers=layers, width=width, heads=width // HEAD, context=context).to(kind))
        data = batches(standard_library(), batch=batch, context=context, seed=0)
        self._tokens, self._targets = (part.to(kind) for part in next(data))

    def forward(self) -> Tensor:
        return self.model(self._tokens, self._targets)


class LlamaStep(CheckedStep):
    """Llama's blocks in bfloat16, without embedding and head. width: a multiple of 128, which a head has."""

    def __init__(self, kind: str, *, layers: int, width: int, context: int, batch: int) -> None:
        torch.manual_seed(0)
        hidden = width * 43 // 16  # 11,008 at Llama 2 7B's width of 4,096
        super().__init__(_Stack(layers, width, hidden, kind))
        self._turn = rotary(context, LLAMA_HEAD, kind)
        self._x = torch.randn(batch, context, width, dtype=torch.bfloat16).to(kind)

    def forward(self) -> Tensor:
        return self.model(self._x, *self._turn).float().pow(2).mean()


class _Stack(nn.Module):
    def __init__(self, layers: int, width: int, hidden: int, kind: str) -> None:
        super().__init__()
        with torch.device(kind):
            blocks = [Block(width, width // LLAMA_HEAD, hidden).bfloat16() for _ in range(layers)]
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def add_options(parser: argparse.ArgumentParser, *, width: int, context: int, batch: int) -> None:
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=width, help=f"a multiple of {HEAD}")
    parser.add_argument("--context", type=int, default=context)
    parser.add_argument("--batch", type=int, default=batch)
