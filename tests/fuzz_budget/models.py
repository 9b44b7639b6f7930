"""Layered models of any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class ModelPlan:
    """layers: the kind of each. rows, width: of what goes from layer to layer. classes: the width of the head's
    result, 0 for no head. seed: of the weights and inputs."""

    layers: tuple[str, ...]
    width: int
    rows: int
    classes: int
    bfloat16: bool
    checkpointed: bool
    seed: int

    @property
    def nbytes(self) -> int:
        """Of what goes from layer to layer."""
        return self.rows * self.width * (2 if self.bfloat16 else 4)


class FailsHere(Exception):
    """What a layer fails with that was to fail."""


class Smooth(nn.Module):
    """Three tensors are saved for backward, and one product is made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(torch.sin(x)))


class Wide(nn.Module):
    """A feed-forward network, behind a norm and around a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(3 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return y


class Elementwise(nn.Module):
    """Many small operations, and few weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.scale + self.shift) * torch.sigmoid(x)


class Dropped(nn.Module):
    """A mask is saved, which is smaller than the others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(functional.relu(self.inner(x)), 0.2, self.training)


class Gated(nn.Module):
    """Two ways side by side, which meet in a product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + functional.silu(self.gate(x)) * self.up(x)
        return y


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "smooth": Smooth,
    "wide": Wide,
    "elementwise": Elementwise,
    "dropped": Dropped,
    "gated": Gated,
}
# How much each computes, beside others.
COSTS = {"smooth": 3, "wide": 12, "elementwise": 5, "dropped": 3, "gated": 5}


class Model(nn.Module):
    """fails: the layer whose next forward fails; a negative number is one whose next backward does."""

    def __init__(self, plan: ModelPlan) -> None:
        super().__init__()
        self.layers = nn.ModuleList(KINDS[kind](plan.width) for kind in plan.layers)
        self.head = nn.Linear(plan.width, plan.classes) if plan.classes else None
        self.fails: int | None = None
        self._checkpointed = plan.checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(x)

    def loss(self, x: Tensor) -> Tensor:
        """The same under another name, which is nobody's forward."""
        for number, layer in enumerate(self.layers):
            if self.fails == number:
                self.fails = None
                raise FailsHere
            x = checkpoint(layer, x, use_reentrant=False) if self._checkpointed else layer(x)
            if self.fails == number - len(self.layers) and x.requires_grad:
                self.fails = None
                x.register_hook(_fail)
        if self.head is not None:
            x = torch.logsumexp(self.head(x), -1)
        return x.float().pow(2).mean()


def _fail(gradient: Tensor) -> None:
    raise FailsHere
