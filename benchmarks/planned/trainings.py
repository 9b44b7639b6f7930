"""The trainings that are planned: real code, with layers left out where that leaves the ratios as they are."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT
from llama import Layer as LlamaLayer
from llama import Llama, Shape


class Training:
    """A model in bfloat16 on the device, and AdamW.

    step(number): makes a step, forward to optimizer. kinds: how many steps differ from each other.
    """

    def __init__(
        self, make: Callable[[], nn.Module], loss: Callable[[nn.Module, int], Iterator[Tensor]], kinds: int = 1
    ) -> None:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("npu"):  # made there, a dry run's weights take no memory here
            self.model = make()
        torch.set_default_dtype(torch.float32)
        self.kinds = kinds
        self._loss = loss
        self._optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def step(self, number: int) -> None:
        for loss in self._loss(self.model, number):
            loss.backward()
            del loss
        self._optimizer.step()
        self._optimizer.zero_grad()


def gpt() -> Training:
    """A GPT of eight layers whose attention is products and a softmax: 4 sequences of 2048."""
    tokens = torch.zeros(4, 2048, dtype=torch.int64, device="npu")
    return Training(
        lambda: GPT(layers=8, width=2048, heads=16, context=2048), lambda model, _: iter([model(tokens, tokens)])
    )


def llama() -> Training:
    """Llama 2 7B with 8 of its 32 layers, and one sequence of 8192."""
    tokens = torch.zeros(1, 8192, dtype=torch.int64, device="npu")
    shape = Shape(layers=8, width=4096, heads=32, hidden=11008)
    return Training(lambda: Llama(shape, 8192), lambda model, _: iter([model(tokens, tokens)]))


def vit() -> Training:
    """ViT-H/14 with 12 of its 32 layers, and 64 images of 256 patches."""
    patches = torch.zeros(64, 256, 1280, dtype=torch.bfloat16, device="npu")
    return Training(
        lambda: nn.Sequential(*(_VitLayer(1280, 16) for _ in range(12))),
        lambda model, _: iter([model(patches).float().mean()]),
    )


def conv() -> Training:
    """ResNet-50 and 256 images of 224 x 224: layers of very different sizes."""
    images = torch.zeros(256, 3, 224, 224, dtype=torch.bfloat16, device="npu")
    return Training(_resnet, lambda model, _: iter([model(images).float().mean()]))


def moe() -> Training:
    """Eight layers of eight experts, of which each of 8192 tokens has two; their loads change with each step."""
    x = torch.zeros(8192, 2048, dtype=torch.bfloat16, device="npu")

    def loss(model: nn.Module, number: int) -> Iterator[Tensor]:
        chance = random.Random(str(number))  # -1 is not 1
        for layer in model:
            layer.loads = _loads(chance, tokens=2 * len(x), experts=8)
        yield model(x).float().mean()

    return Training(lambda: nn.Sequential(*(_MoeLayer(2048, 16, 8) for _ in range(8))), loss, kinds=4)


def pipeline() -> Training:
    """The first of four stages under 1F1B: four layers of Llama 2 7B, and 8 microbatches of 2048 tokens."""
    x = torch.zeros(1, 2048, 4096, dtype=torch.bfloat16, device="npu")

    def losses(model: nn.Module, _: int) -> Iterator[Tensor]:
        under_way = []
        for _ in range(8):
            under_way.append(model(x).float().mean())
            if len(under_way) == 4:
                yield under_way.pop(0)
        while under_way:
            yield under_way.pop(0)

    return Training(lambda: _Stage(4, 2048), losses)


TRAININGS: dict[str, Callable[[], Training]] = {
    "gpt-8": gpt,
    "llama-7b": llama,
    "moe": moe,
    "vit-h": vit,
    "conv": conv,
    "1f1b": pipeline,
}


class _Stage(nn.Module):
    def __init__(self, layers: int, tokens: int) -> None:
        super().__init__()
        shape = Shape(layers=layers, width=4096, heads=32, hidden=11008)
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(layers))
        depth = shape.width // shape.heads
        self.register_buffer("turn", torch.zeros(2, tokens, depth), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, tuple(self.turn))
        return x


class _VitLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = _Attention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, causal=False)
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, *, causal: bool) -> Tensor:
        """x: (batch, positions, width)."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.projection(attended.transpose(1, 2).flatten(2))


class _MoeLayer(nn.Module):
    """loads: the rows of each expert, as a router would have them that the host need not ask."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.attention = _Attention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )
        self.loads: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        """x: (tokens, width), of eight sequences."""
        x = x + self.attention(x.unflatten(0, (8, -1)), causal=True).flatten(0, 1)
        scores, choices = self.router(self.norm(x)).softmax(-1).topk(2)
        order = choices.flatten().argsort()
        rows = self.norm(x).repeat_interleave(2, 0)[order].split(self.loads)
        made = torch.cat([expert(some) for expert, some in zip(self.experts, rows, strict=True)])
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        return x + (made[back].unflatten(0, (-1, 2)) * scores[..., None]).sum(1)


def _loads(chance: random.Random, *, tokens: int, experts: int) -> list[int]:
    """Up to three times as many rows for one expert as for another."""
    weights = [chance.uniform(1, 3) for _ in range(experts)]
    loads = [int(tokens * weight / sum(weights)) for weight in weights]
    loads[0] += tokens - sum(loads)
    return loads


class _Bottleneck(nn.Module):
    def __init__(self, before: int, inside: int, stride: int) -> None:
        super().__init__()
        after = 4 * inside
        self.body = nn.Sequential(
            nn.Conv2d(before, inside, 1, bias=False),
            nn.BatchNorm2d(inside),
            nn.ReLU(),
            nn.Conv2d(inside, inside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inside),
            nn.ReLU(),
            nn.Conv2d(inside, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.short = (
            nn.Identity()
            if before == after and stride == 1
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.short(x))


def _resnet() -> nn.Module:
    blocks: list[nn.Module] = []
    before = 64
    for number, inside, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for index in range(number):
            blocks.append(_Bottleneck(before, inside, stride if index == 0 else 1))
            before = 4 * inside
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(
        *stem, nn.Sequential(*blocks), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)
    )
