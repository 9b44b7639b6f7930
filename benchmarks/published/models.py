"""The decoder that all rows train, made of a row's kernels."""

import torch
import torch_npu  # type: ignore[import-untyped]
from torch import Tensor, nn

from benchmarks.published.kernels import Kernels, recomputed
from benchmarks.published.shapes import Shape


class Decoder(nn.Module):
    """GPT-2 and MPT, or Llama and Qwen2, in bfloat16.

    layers: how many of the shape's layers are here: a stage of a pipeline has its part of them.
    first, last: whether the embedding and the loss are here.
    document: attention stays within so many positions, as among packed documents.
    """

    def __init__(
        self,
        shape: Shape,
        kernels: Kernels,
        sequence: int,
        document: int,
        recompute: bool,
        layers: int,
        first: bool,
        last: bool,
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.recompute = recompute
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden) if first else None
        self.positions = None if shape.gated else nn.Embedding(sequence, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, kernels, document) for _ in range(layers))
        self.norm = Norm(shape, kernels) if last else None
        self.head = nn.Parameter(torch.empty(shape.vocabulary, shape.hidden)) if last else None
        angles = torch.outer(torch.arange(sequence, dtype=torch.float32), torch.ones(shape.head_size))
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos()[None, :, None].bfloat16())
        self.register_buffer("sin", angles.sin()[None, :, None].bfloat16())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss, or what is sent to the next stage.

        tokens: [batch, positions], or what the stage before sent; targets: [batch, positions].
        """
        x = tokens if self.embedding is None else self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight
        for block in self.blocks:
            x = recomputed(block, x, self.cos, self.sin) if self.recompute else block(x, self.cos, self.sin)
        if self.norm is None or self.head is None:
            return x
        return self.kernels.loss(self.norm(x).flatten(0, 1), self.head, targets.flatten())


class Block(nn.Module):
    def __init__(self, shape: Shape, kernels: Kernels, document: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = Norm(shape, kernels), Norm(shape, kernels)
        self.attention = Attention(shape, kernels, document)
        self.feed_forward = FeedForward(shape, kernels)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.first_norm(x), cos, sin)
        output: Tensor = x + self.feed_forward(self.second_norm(x))
        return output


class Norm(nn.Module):
    def __init__(self, shape: Shape, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(shape.hidden))
        self.bias = None if shape.gated else nn.Parameter(torch.empty(shape.hidden))

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return self.kernels.norm(x, self.weight)
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class Attention(nn.Module):
    """Causal attention by a fused kernel; key heads may be shared."""

    def __init__(self, shape: Shape, kernels: Kernels, document: int) -> None:
        super().__init__()
        self.shape, self.kernels, self.document = shape, kernels, document
        bias = shape.attention_bias or not shape.gated
        self.parts = [heads * shape.head_size for heads in (shape.heads, shape.key_heads, shape.key_heads)]
        widths = [sum(self.parts)] if kernels.joins_projections or not shape.gated else self.parts
        self.qkv = nn.ModuleList(nn.Linear(shape.hidden, width, bias=bias) for width in widths)
        self.output = nn.Linear(shape.hidden, shape.hidden, bias=not shape.gated)
        self.register_buffer("mask", torch.ones(2048, 2048, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        projected = [project(x) for project in self.qkv]
        if len(projected) == 1:
            projected = list(projected[0].split(self.parts, -1))
        query, key, value = (part.unflatten(-1, (-1, self.shape.head_size)) for part in projected)
        if self.shape.gated:
            query, key = (self.kernels.rotate(each, cos, sin) for each in (query, key))
        query, key, value = (
            part.flatten(2).reshape(-1, self.document, part[0, 0].numel()) for part in (query, key, value)
        )
        attended = torch_npu.npu_fusion_attention(
            query, key, value, self.shape.heads, "BSH", atten_mask=self.mask, scale=0.1, sparse_mode=2
        )[0]
        output: Tensor = self.output(attended.reshape(x.shape))
        return output


class FeedForward(nn.Module):
    def __init__(self, shape: Shape, kernels: Kernels) -> None:
        super().__init__()
        self.kernels, self.gated = kernels, shape.gated
        joined = kernels.joins_projections
        widths = (
            ([2 * shape.feed_forward] if joined else [shape.feed_forward] * 2)
            if shape.gated
            else [shape.feed_forward]
        )
        self.up = nn.ModuleList(nn.Linear(shape.hidden, width, bias=not shape.gated) for width in widths)
        self.down = nn.Linear(shape.feed_forward, shape.hidden, bias=not shape.gated)

    def forward(self, x: Tensor) -> Tensor:
        widened = tuple(project(x) for project in self.up)
        inner = self.kernels.gate(widened) if self.gated else nn.functional.gelu(widened[0])
        output: Tensor = self.down(inner)
        return output
