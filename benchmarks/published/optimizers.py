"""What becomes of gradients: one class for each way in which frameworks keep weights and states.

A card of `cards` keeps the states of its share. The traffic between cards is in traffic.py.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn


class Optimizer(Protocol):
    """cards: how many share the states."""

    def __init__(self, model: nn.Module, cards: int) -> None: ...

    def step(self) -> None:
        """Updates the model with what its backward passes left, and forgets that."""
        ...


class Plain:
    """AdamW of torch on the model's own weights, tensor by tensor in lists (foreach)."""

    def __init__(self, model: nn.Module, cards: int) -> None:
        self._adamw = torch.optim.AdamW(model.parameters())

    def step(self) -> None:
        self._adamw.step()
        self._adamw.zero_grad()


class Shares:
    """AdamW on float32 weights and states, of which a card keeps its share; gradients are bfloat16 (ZeRO-1)."""

    def __init__(self, model: nn.Module, cards: int) -> None:
        self._parameters = list(model.parameters())
        self._cards = cards
        self._shares = [self._empty_share(each) for each in self._parameters]
        self._adamw = self._make_adamw(self._shares)

    def _make_adamw(self, shares: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(shares, fused=True)

    def _empty_share(self, parameter: Tensor) -> Tensor:
        return torch.zeros(-(-parameter.numel() // self._cards), dtype=torch.float32, device=parameter.device)

    def _share_of(self, gradient: Tensor) -> Tensor:
        return gradient.flatten()[: -(-gradient.numel() // self._cards)]

    def _gradients(self) -> Iterable[Tensor]:
        for parameter in self._parameters:
            assert parameter.grad is not None
            yield self._share_of(parameter.grad).float()

    def step(self) -> None:
        for share, gradient in zip(self._shares, self._gradients(), strict=True):
            share.grad = gradient
        torch.nn.utils.clip_grad_norm_(self._shares, 1.0)
        self._adamw.step()
        for parameter, share in zip(self._parameters, self._shares, strict=True):
            self._share_of(parameter.data).copy_(share[: self._share_of(parameter.data).numel()])
            parameter.grad = None


class Fsdp(Shares):
    """FSDP of PyTorch 1: each micro batch's gradients are copied into a flat one, cast to float32, and reduced.

    AdamW runs in lists (foreach).
    """

    def __init__(self, model: nn.Module, cards: int) -> None:
        super().__init__(model, cards)
        self._sums = [torch.zeros_like(share) for share in self._shares]
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            parameter.register_post_accumulate_grad_hook(self._reduce_into(total))

    def _make_adamw(self, shares: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(shares, foreach=True)

    def _reduce_into(self, total: Tensor) -> Callable[[Tensor], None]:
        def reduce(parameter: Tensor) -> None:
            assert parameter.grad is not None
            flat = parameter.grad.flatten().clone()
            total.add_(self._share_of(flat.float()))
            parameter.grad = None

        return reduce

    def _gradients(self) -> Iterable[Tensor]:
        return self._sums

    def step(self) -> None:
        super().step()
        torch._foreach_zero_(self._sums)


class DistributedOptimizer(Shares):
    """Megatron's: each micro batch's gradients are added to float32 ones."""

    def __init__(self, model: nn.Module, cards: int) -> None:
        super().__init__(model, cards)
        self._sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in self._parameters]
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            parameter.register_post_accumulate_grad_hook(self._add_to(total))

    def _add_to(self, total: Tensor) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            total.add_(parameter.grad)
            parameter.grad = None

        return add

    def _gradients(self) -> Iterable[Tensor]:
        return map(self._share_of, self._sums)

    def step(self) -> None:
        super().step()
        torch._foreach_zero_(self._sums)


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "plain": Plain,
    "shares": Shares,
    "fsdp": Fsdp,
    "megatron": DistributedOptimizer,
}
