"""Which kernels a framework launches for the parts of a decoder: one class for each way of writing them."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch_npu  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Kernels(Protocol):
    """Of a row. joins_projections: query, key and value are one product, and so are the halves of a gated layer."""

    joins_projections: bool

    def norm(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [batch, positions, heads, size]; cos and sin: [1, positions, 1, size]."""
        ...

    def gate(self, halves: tuple[Tensor, ...]) -> Tensor:
        """halves: both, or one tensor that has them side by side."""
        ...

    def loss(self, x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        """x: [tokens, hidden]; head: [vocabulary, hidden]; targets: [tokens]; the mean cross entropy."""
        ...


class Eager:
    """PyTorch operators one by one, as torchtune writes them: norms and rotations in float32."""

    joins_projections = (
        False  # query, key and value, and the two halves of a gated layer, are products of their own
    )

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * weight

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = (each.chunk(2, -1)[0].float() for each in (cos, sin))
        return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2).type_as(x)

    def gate(self, halves: tuple[Tensor, ...]) -> Tensor:
        first, second = halves
        return functional.silu(first) * second

    def loss(self, x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(x, head).float(), targets)


class Fused:
    """One kernel for each norm, rotation, gate and loss, as torch.compile or hand-written kernels have it."""

    joins_projections = True

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        normed: Tensor = torch_npu.npu_rms_norm(x, weight)[0]
        return normed

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated: Tensor = torch_npu.npu_rotary_mul(x, cos, sin)
        return rotated

    def gate(self, halves: tuple[Tensor, ...]) -> Tensor:
        gated: Tensor = torch_npu.npu_swiglu(halves[0])
        return gated

    def loss(self, x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = torch_npu.npu_cross_entropy_loss(functional.linear(x, head), targets)[0]
        return loss


class Chunked(Fused):
    """The same, with logits of an eighth of the tokens at a time: torchtune's chunked loss, compiled."""

    def loss(self, x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        return sum(map(super().loss, x.chunk(8), [head] * 8, targets.chunk(8)), torch.zeros((), device=x.device))


class Composer(Fused):
    """MPT under Composer, which also computes two metrics of each micro batch's logits, in float32."""

    def loss(self, x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        logits = functional.linear(x, head)
        loss: Tensor = torch_npu.npu_cross_entropy_loss(logits, targets)[0]
        with torch.no_grad():
            for _ in ("cross entropy", "perplexity"):
                functional.cross_entropy(logits.float(), targets)
        return loss


class Megatron(Fused):
    """MindSpeed-LLM on Megatron-Core: fused kernels, but the loss in steps and in float32."""

    def loss(self, x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = _VocabularyLoss.apply(functional.linear(x, head), targets)
        return loss


class MegatronPlainRotation(Megatron):
    """The same without --use-fused-rotary-pos-emb."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin


class _VocabularyLoss(torch.autograd.Function):
    """Megatron-Core's cross entropy of a vocabulary that one card has whole: pass by pass, in float32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        wide = logits.float()
        wide -= wide.max(-1, keepdim=True).values
        predicted = wide.gather(-1, targets[:, None])
        torch.exp(wide, out=wide)
        total = wide.sum(-1, keepdim=True)
        wide.div_(total)
        ctx.save_for_backward(wide, targets)
        return (total.log() - predicted).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        softmax, targets = ctx.saved_tensors
        softmax.scatter_add_(-1, targets[:, None], torch.full_like(targets[:, None], -1, dtype=softmax.dtype))
        softmax.mul_(grad / targets.numel())
        return softmax.bfloat16(), None


KERNELS: dict[str, type[Kernels]] = {
    "eager": Eager,
    "fused": Fused,
    "chunked": Chunked,
    "composer": Composer,
    "megatron": Megatron,
    "megatron-plain-rotation": MegatronPlainRotation,
}


def recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """What function returns, computed again in the backward pass."""
    result: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result
