"""Fine-tuning by LoRA as Lit-GPT did it in October 2023: small kernels, which wait for the host.

Only what launches kernels is rebuilt: low rank updates of queries and values, norms and rotations operator by
operator, the loss in chunks of 128 tokens. AdamW, each 128th iteration, is not in the time of one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

RANK, DROPOUT, CHUNK = 8, 0.05, 128


@dataclass(frozen=True)
class LoraShape:
    """llama: RMSNorm, a gated layer, two residuals; else LayerNorm, GELU, and one residual, and biases.

    rotated: how much of each head; norms: of a block.
    """

    layers: int
    hidden: int
    heads: int
    feed_forward: int
    vocabulary: int
    llama: bool
    rotated: float
    norms: int


LORA_SHAPES = {
    "phi-1.5": LoraShape(24, 2048, 32, 8192, 51200, False, 0.5, 1),
    "stablelm-alpha-3b": LoraShape(16, 4096, 32, 16384, 50688, False, 0.25, 2),
    "llama2-7b": LoraShape(32, 4096, 32, 11008, 32000, True, 1.0, 2),
    "llama2-13b": LoraShape(40, 5120, 40, 13824, 32000, True, 1.0, 2),
}


class LoraModel(nn.Module):
    def __init__(self, shape: LoraShape, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        size = int(shape.hidden // shape.heads * shape.rotated)
        # No buffers: Lit-GPT makes them anew for its longest text, after it has converted the model, in float32.
        self.cos, self.sin = torch.ones(2, sequence, size)
        for name, parameter in self.named_parameters():
            parameter.requires_grad = "lora" in name

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: [batch, positions]; the mean cross entropy."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        chunks = [self.head(part).flatten(0, 1) for part in self.norm(x).split(CHUNK, 1)]
        of_chunks = [part.flatten() for part in targets.split(CHUNK, 1)]
        losses = map(lambda logits, of: functional.cross_entropy(logits, of, reduction="none"), chunks, of_chunks)
        return torch.cat(list(losses)).mean()


class Block(nn.Module):
    def __init__(self, shape: LoraShape) -> None:
        super().__init__()
        self.norms = nn.ModuleList(_norm(shape) for _ in range(shape.norms))
        self.attention, self.llama = Attention(shape), shape.llama
        widths = [shape.feed_forward] * (2 if shape.llama else 1)
        self.up = nn.ModuleList(nn.Linear(shape.hidden, width, bias=not shape.llama) for width in widths)
        self.down = nn.Linear(shape.feed_forward, shape.hidden, bias=not shape.llama)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norms[0](x)
        attended = self.attention(normed, cos, sin)
        if self.llama:
            x = attended + x
            gated: Tensor = self._feed_forward(self.norms[1](x)) + x
            return gated
        normed = self.norms[-1](x) if len(self.norms) > 1 else normed
        return self._feed_forward(normed) + attended + x

    def _feed_forward(self, x: Tensor) -> Tensor:
        widened = [project(x) for project in self.up]
        inner = functional.silu(widened[0]) * widened[1] if self.llama else functional.gelu(widened[0])
        output: Tensor = self.down(inner)
        return output


class Attention(nn.Module):
    def __init__(self, shape: LoraShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = UpdatedProjection(shape)
        self.output = nn.Linear(shape.hidden, shape.hidden, bias=not shape.llama)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (self.heads, 3, -1)).permute(0, 2, 3, 1, 4).split(1, 2)
        query, key, value = (part.reshape(len(x), self.heads, x.shape[1], -1) for part in parts)
        query, key = (self._turned(each, cos, sin) for each in (query, key))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.output(attended.transpose(1, 2).reshape(x.shape))
        return output

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        first, second = rotated.chunk(2, -1)
        turned = (rotated * cos + torch.cat((-second, first), -1) * sin).type_as(x)
        return torch.cat((turned, rest), -1)


class UpdatedProjection(nn.Module):
    """Query, key and value of each token, of which queries and values have an update of low rank.

    The updated columns are a list, of which each call makes a tensor: the host waits for that copy.
    """

    def __init__(self, shape: LoraShape) -> None:
        super().__init__()
        self.linear = nn.Linear(shape.hidden, 3 * shape.hidden, bias=not shape.llama)
        self.dropout = nn.Dropout(DROPOUT)
        self.lora_a = nn.Parameter(torch.empty(2 * RANK, shape.hidden))
        self.lora_b = nn.Parameter(torch.empty(2 * shape.hidden, RANK))
        self.columns = [*range(shape.hidden), *range(2 * shape.hidden, 3 * shape.hidden)]

    def forward(self, x: Tensor) -> Tensor:
        plain = self.linear(x)
        narrow = functional.linear(self.dropout(x), self.lora_a).transpose(-2, -1)
        wide = functional.conv1d(narrow, self.lora_b.unsqueeze(-1), groups=2).transpose(-2, -1)
        updated: Tensor = plain + self._spread(wide) * 2.0
        return updated

    def _spread(self, wide: Tensor) -> Tensor:
        wide = wide.transpose(0, 1)
        zeros = wide.new_zeros((wide.shape[0] * wide.shape[1], self.linear.out_features))
        columns = torch.tensor(self.columns, device=wide.device)
        spread = zeros.index_copy(1, columns, wide.reshape(len(zeros), -1))
        return spread.view(*wide.shape[:-1], -1).transpose(0, 1)


def _norm(shape: LoraShape) -> nn.Module:
    return RmsNorm(shape.hidden) if shape.llama else nn.LayerNorm(shape.hidden)


class RmsNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5))
