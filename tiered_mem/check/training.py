"""A small GPT that is trained, and the comparison of two such trainings to the bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..device.device import Device

_VOCABULARY, _WIDTH, _HEADS, _CONTEXT, _BATCH, _LAYERS = 256, 128, 4, 128, 8, 4

Optimizer = Callable[[torch.optim.Optimizer], torch.optim.Optimizer]


@dataclass
class Trained:
    """What came of a training, on the cpu.

    resident: bytes of the device that model, optimizer and batch have before the last step. peak: the most in it.
        Both are without what was there before the training.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    resident: int = 0
    peak: int = 0

    def difference(self, other: Trained) -> str:
        """The first thing in which `other` is not this to the bit, in words; "" if there is none."""
        for step, (loss, its_loss) in enumerate(zip(self.losses, other.losses, strict=True), 1):
            if loss != its_loss:
                return (
                    f"the loss of step {step} of {len(self.losses)} is {its_loss!r}, and {loss!r} in the plain run"
                )
        for what, all_mine, all_theirs in (
            ("gradient", self.gradients, other.gradients),
            ("weight", self.weights, other.weights),
        ):
            for name, mine in all_mine.items():
                if not torch.equal(mine, all_theirs[name]):
                    count = int((mine != all_theirs[name]).sum())
                    return f"the {what} of {name} differs in {count} of {mine.numel()} elements at the end"
        return ""


def train(
    device: Device,
    steps: int,
    *,
    forward: Callable[[nn.Module], AbstractContextManager[Any]] = lambda layers: contextlib.nullcontext(),
    optimizer: Optimizer = lambda plain: plain,
    between: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda model, optimizer: None,
) -> Trained:
    """Trains the model, the same each time.

    forward: what is entered around each forward, made of the model's layers once.
    optimizer: makes of the plain optimizer the one to use.
    between: is called between two steps.
    """
    before = device.memory()[0]
    torch.manual_seed(0)
    model = CheckedGPT().to(device.torch_device)
    batches = [torch.randint(_VOCABULARY, (_BATCH, _CONTEXT + 1)) for _ in range(steps)]
    stepping = optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    around = forward(model.layers)
    trained = Trained()
    for number, batch in enumerate(batches):
        if number:
            between(model, stepping)
        tokens = batch.to(device.torch_device)
        trained.resident = device.memory()[0] - before
        device.reset_peak()
        with around:
            loss = model(tokens)
        torch.autograd.backward(loss)
        stepping.step()
        trained.losses.append(loss.item())
        trained.peak = device.memory()[1] - before
        if number == steps - 1:
            trained.gradients = _on_cpu({name: p.grad for name, p in model.named_parameters()})
        stepping.zero_grad()
        del loss
    trained.weights = _on_cpu(model.state_dict())
    return trained


class CheckedGPT(nn.Module):
    """The mean loss of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        self.places = nn.Parameter(torch.randn(_CONTEXT, _WIDTH) / 50)
        self.layers = nn.ModuleList(_Layer() for _ in range(_LAYERS))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.tokens(tokens[:, :-1]) + self.places
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.attend, self.project = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)
        self.register_buffer("later", torch.ones(_CONTEXT, _CONTEXT, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.project(self._attention(self.first(x)))
        grown: torch.Tensor = self.down(functional.gelu(self.up(self.second(x))))
        return x + grown

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        heads = self.attend(x).view(batch, context, 3, _HEADS, width // _HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads[0], heads[1], heads[2]
        scores = query @ key.transpose(-1, -2) / (width // _HEADS) ** 0.5
        shares = scores.masked_fill(self.later, -1e9).softmax(-1)
        mixed: torch.Tensor = shares @ value
        return mixed.transpose(1, 2).reshape(batch, context, width)


def _on_cpu(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items() if tensor is not None}
