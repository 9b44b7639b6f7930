"""The example's GPT, given the same data in each step."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from examples.gpt import GPT, batches, standard_library

HEAD = 32


class GptStep:
    """kind: the device. width: a multiple of 32, which a head has."""

    def __init__(self, kind: str, *, layers: int, width: int, context: int, batch: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(layers=layers, width=width, heads=width // HEAD, context=context).to(kind)
        data = batches(standard_library(), batch=batch, context=context, seed=0)
        self._tokens, self._targets = (part.to(kind) for part in next(data))
        self._right: list[Tensor] = []

    def forward(self) -> Tensor:
        """The loss."""
        return self.model(self._tokens, self._targets)

    def remember(self) -> None:
        """The gradients that there are now are the right ones. They are kept on the host."""
        self._right = self._gradients()

    def is_right(self) -> bool:
        """Whether the gradients that there are now are the right ones, bit for bit."""
        pairs = zip(self._gradients(), self._right, strict=True)
        return all(torch.equal(found, right) for found, right in pairs)

    def _gradients(self) -> list[Tensor]:
        return [weight.grad.cpu() for weight in self.model.parameters() if weight.grad is not None]


def add_options(parser: argparse.ArgumentParser, *, width: int, context: int, batch: int) -> None:
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=width, help=f"a multiple of {HEAD}")
    parser.add_argument("--context", type=int, default=context)
    parser.add_argument("--batch", type=int, default=batch)
