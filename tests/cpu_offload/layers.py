"""Layers with the constructors and calls of Transformer Engine's, made of torch's operators."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.cpu_offload.mxfp8 import MXFP8Quantizer
from tiered_mem.cpu_offload import is_cpu_offload_enabled, mark_not_offload, start_offload

WIDTH = 256
GROUPS = 4
SHAPE = (4, 256, WIDTH)  # 262,144 elements: the least that is moved
GROUPED_SHAPE = (GROUPS, *SHAPE)


class Saving(enum.Enum):
    """How a layer saves its input for backward."""

    PLAIN = "plain"
    QUANTIZED = "quantized"  # as a tensor in MXFP8
    IN_PARTS = "in parts"  # as the parts of one, which the layer takes out and puts back itself


_saving: ContextVar[Saving] = ContextVar("saving", default=Saving.PLAIN)


@contextlib.contextmanager
def saving(how: Saving) -> Iterator[None]:
    """Layers that are called inside save their input in that way."""
    token = _saving.set(how)
    yield
    _saving.reset(token)


def layer_names() -> Sequence[str]:
    return tuple(_LAYERS)


def make_layer(name: str, device: str) -> nn.Module:
    return _LAYERS[name](device)


def input_shape(name: str) -> tuple[int, ...]:
    """A grouped layer splits its input, of which each part is just large enough to be moved."""
    return GROUPED_SHAPE if name == "grouped_linear" else SHAPE


def call(layer: nn.Module, x: torch.Tensor, *, first: bool = False) -> torch.Tensor:
    if isinstance(layer, GroupedLinear):
        rows = x.numel() // WIDTH
        return layer(x, is_first_microbatch=first, m_splits=[rows // GROUPS] * GROUPS)
    return layer(x, is_first_microbatch=first)


class Linear(nn.Module):
    """Tells the offloader when its input is ready, and that its weight stays."""

    def __init__(self, in_features: int, out_features: int, *, params_dtype: torch.dtype, device: str) -> None:
        super().__init__()
        weight = torch.randn(out_features, in_features) / in_features**0.5
        self.weight = nn.Parameter(weight.to(params_dtype).to(device))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=params_dtype, device=device))

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        if is_cpu_offload_enabled():
            start_offload(x)
            mark_not_offload(self.weight)
        return _project(x, self.weight) + self.bias


class LayerNormLinear(nn.Module):
    def __init__(self, in_features: int, out_features: int, *, params_dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(in_features, dtype=params_dtype, device=device)
        self.linear = Linear(in_features, out_features, params_dtype=params_dtype, device=device)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        return self.linear(self.norm(x))


class LayerNormMLP(nn.Module):
    def __init__(self, hidden: int, ffn_hidden: int, *, params_dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden, dtype=params_dtype, device=device)
        self.up = Linear(hidden, ffn_hidden, params_dtype=params_dtype, device=device)
        self.down = Linear(ffn_hidden, hidden, params_dtype=params_dtype, device=device)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        return self.down(functional.gelu(self.up(self.norm(x))))


class GroupedLinear(nn.Module):
    """Splits the rows of its input, and has a weight for each split. What it saves are views of one tensor."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, *, params_dtype: torch.dtype, device: str
    ) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            Linear(in_features, out_features, params_dtype=params_dtype, device=device) for _ in range(num_gemms)
        )

    def forward(
        self, x: torch.Tensor, is_first_microbatch: bool | None = None, *, m_splits: Sequence[int]
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).split(list(m_splits))
        outputs = [expert(part) for expert, part in zip(self.experts, rows, strict=True)]
        return torch.cat(outputs).view(*x.shape[:-1], -1)


class L2Normalization(nn.Module):
    """Scales each row to length 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    how = _saving.get()
    if how is Saving.PLAIN:
        return functional.linear(x, weight)
    return _QuantizedProjection.apply(x, weight, how)


class _QuantizedProjection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, how: Saving) -> torch.Tensor:
        quantized = MXFP8Quantizer()(x)
        y = functional.linear(quantized.dequantize(), weight)
        if is_cpu_offload_enabled():
            start_offload(quantized)
        if how is Saving.QUANTIZED:
            ctx.save_for_backward(weight, quantized)
        else:
            parts, ctx.empty = quantized.prepare_for_saving()
            ctx.save_for_backward(weight, *parts)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None]:
        weight, *saved = ctx.saved_tensors
        if len(saved) == 1:
            x = saved[0].dequantize()
        else:
            left = ctx.empty.restore_from_saved(saved)
            assert not left
            x = ctx.empty.dequantize()
            ctx.empty.prepare_for_saving()
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        return of_x, gradient.flatten(0, -2).t() @ x.flatten(0, -2), None


_LAYERS: dict[str, Callable[[str], nn.Module]] = {
    "linear": lambda device: Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, device=device),
    "layernorm_linear": lambda device: LayerNormLinear(WIDTH, WIDTH, params_dtype=torch.bfloat16, device=device),
    "layernorm_mlp": lambda device: LayerNormMLP(WIDTH, WIDTH, params_dtype=torch.bfloat16, device=device),
    "grouped_linear": lambda device: GroupedLinear(
        GROUPS, WIDTH, WIDTH, params_dtype=torch.bfloat16, device=device
    ),
}
