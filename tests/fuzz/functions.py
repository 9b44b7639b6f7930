"""Operations that a random layer may consist of. Each takes two tensors of any shape and gives a tensor.

They are chosen for what they save for backward: views and whole tensors, several dtypes, masks and indices, nothing
at all, tensors of no dimension and of no elements, and what was changed in place before it was saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tiered_mem.cpu_offload import mark_not_offload, start_offload


class At(NamedTuple):
    """What an operation goes by: the shape of the matrices, and a number between 0 and 1 that was drawn for it."""

    rows: int
    width: int
    share: float

    @property
    def size(self) -> int:
        return self.rows * self.width

    @property
    def row(self) -> int:
        return int(self.share * self.rows)


Function = Callable[[Tensor, Tensor, At], Tensor]


def real(x: Tensor) -> Tensor:
    """As a tensor of a real floating type, of the same shape."""
    if x.is_complex():
        return x.real + x.imag
    return x if x.is_floating_point() else x.float()


def fit(x: Tensor, at: At) -> Tensor:
    """As a float matrix of rows x width: what there is of it, repeated where it is too little."""
    x = real(x).float().flatten()
    if x.numel() == 0:
        return x.sum().expand(at.rows, at.width)
    if x.numel() < at.size:
        x = x.repeat(-(-at.size // x.numel()))
    return x[: at.size].view(at.rows, at.width)


def places(x: Tensor, at: At) -> Tensor:
    """Row numbers that depend on the values: one for each row."""
    return (fit(x, at).detach()[:, 0] * 7).long().remainder(at.rows)


class SavesInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, None, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        a, _, b = ctx.saved_tensors
        return gradients[0] * b, gradients[0] * a


class SavesOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        out = a.tanh()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (out,) = ctx.saved_tensors
        return gradients[0] * (1 - out * out)


class SavesMiddle(torch.autograd.Function):
    """Saves what is neither input nor output: a mask, numbers of another type, and one tensor twice."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        mask, whole, middle = a > 0, (a * 3).int(), a.abs() + 1
        ctx.save_for_backward(mask, whole, middle, middle)
        return middle.log() * mask + whole

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        mask, whole, middle, again = ctx.saved_tensors
        return gradients[0] * mask * torch.where(whole < 0, -1.0, 1.0) / (middle + again)


class ChangesInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        a.mul_(0.5).sigmoid_()
        ctx.mark_dirty(a)
        ctx.save_for_backward(a)
        return a

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (a,) = ctx.saved_tensors
        return gradients[0] * 0.5 * a * (1 - a)


def write_rows(a: Tensor, b: Tensor, at: At) -> Tensor:
    fresh = fit(a, at) * 1.5
    fresh[at.row :] = fit(b, at)[at.row :]
    return fresh


def write_a_view(a: Tensor, b: Tensor, at: At) -> Tensor:
    fresh = fit(a, at).clone()
    fresh.t()[: at.width // 2].mul_(2).sigmoid_()
    return fresh * fit(b, at)


def marked(a: Tensor, b: Tensor, at: At) -> Tensor:
    x = fit(a, at) * 1.25
    mark_not_offload(x)
    return x * x.sigmoid() + b.numel()


def moved_whole(a: Tensor, b: Tensor, at: At) -> Tensor:
    view = (fit(a, at) * 1.25)[: 1 + at.row]
    start_offload(view, offload_base_tensor=True)
    return view * view.tanh()


def attention(a: Tensor, b: Tensor, at: At) -> Tensor:
    q, k = fit(a, at).view(1, 2, at.rows, -1), fit(b, at).view(1, 2, at.rows, -1)
    return functional.scaled_dot_product_attention(q, k, q, is_causal=at.share > 0.5)


ELEMENTWISE: dict[str, Function] = {
    "gelu": lambda a, b, at: functional.gelu(real(a)),
    "silu": lambda a, b, at: functional.silu(real(a)),
    "relu": lambda a, b, at: real(a).relu(),
    "tanh": lambda a, b, at: real(a).tanh(),
    "softplus": lambda a, b, at: functional.softplus(real(a)),
    "root": lambda a, b, at: (real(a).abs() + 1).sqrt(),
    "bell": lambda a, b, at: real(a).square().neg().exp(),
    "dropout": lambda a, b, at: functional.dropout(real(a), at.share * 0.6),
    "clamp": lambda a, b, at: real(a).clamp(-at.share, 1.0),
    "mul": lambda a, b, at: fit(a, at) * fit(b, at),
    "add": lambda a, b, at: fit(a, at) + fit(b, at),
    "div": lambda a, b, at: fit(a, at) / (fit(b, at).abs() + 1),
    "addcmul": lambda a, b, at: torch.addcmul(fit(a, at), fit(a, at), fit(b, at), value=0.5),
    "lerp": lambda a, b, at: torch.lerp(fit(a, at), fit(b, at), at.share),
    "where": lambda a, b, at: torch.where(fit(a, at) > at.share - 0.5, fit(a, at), fit(b, at)),
    "masked_fill": lambda a, b, at: fit(a, at).masked_fill(fit(b, at) > 0, at.share),
    "masked": lambda a, b, at: fit(a, at) * (fit(b, at) > 0),
}
REDUCING: dict[str, Function] = {
    "softmax": lambda a, b, at: fit(a, at).softmax(-1),
    "log_softmax": lambda a, b, at: fit(a, at).log_softmax(0),
    "scalar": lambda a, b, at: fit(a, at).mean(),
    "scaled": lambda a, b, at: fit(a, at) * fit(b, at).mean(),
    "norm": lambda a, b, at: fit(a, at) / (fit(b, at).norm() + 1),
    "deviation": lambda a, b, at: fit(a, at).var(dim=0),
    "logsumexp": lambda a, b, at: fit(a, at).logsumexp(1, keepdim=True) * fit(b, at),
    "cumsum": lambda a, b, at: fit(a, at).cumsum(0) / at.rows,
    "largest": lambda a, b, at: fit(a, at).max(dim=1).values,
    "amax": lambda a, b, at: fit(a, at).amax(0) * fit(b, at),
    "topk": lambda a, b, at: fit(a, at).topk(2, dim=1).values,
    "sort": lambda a, b, at: fit(a, at).sort(dim=1).values,
    "pool": lambda a, b, at: functional.max_pool1d(fit(a, at)[None], 2),
    "average": lambda a, b, at: functional.avg_pool1d(fit(a, at)[None], 2),
}
MATRIX: dict[str, Function] = {
    "matmul": lambda a, b, at: fit(a, at) @ fit(b, at).t() / at.width,
    "addmm": lambda a, b, at: torch.addmm(fit(a, at), fit(a, at) @ fit(b, at).t() / at.size, fit(b, at)),
    "bmm": lambda a, b, at: torch.bmm(fit(a, at).view(2, -1, at.width), fit(b, at).view(2, at.width, -1)),
    "einsum": lambda a, b, at: torch.einsum("rw,rv->wv", fit(a, at), fit(b, at)) / at.rows,
    "outer": lambda a, b, at: torch.outer(fit(a, at)[0], fit(b, at)[at.row]),
    "attention": attention,
}
VIEWS: dict[str, Function] = {
    "transposed": lambda a, b, at: fit(a, at).t() * 2,
    "transpose": lambda a, b, at: fit(a, at).t(),
    "every_second": lambda a, b, at: fit(a, at)[::2].square(),
    "tail": lambda a, b, at: fit(a, at)[at.row :, 1:].sigmoid(),
    "narrow": lambda a, b, at: fit(a, at).narrow(1, 0, 1),
    "expand": lambda a, b, at: fit(a, at)[at.row].expand(at.rows, at.width) * fit(b, at),
    "expanded": lambda a, b, at: fit(a, at)[:, :1].expand(-1, at.width),
    "as_strided": lambda a, b, at: (fit(a, at) * 2).as_strided((at.rows - 1, 3), (at.width, 2), 1).tanh(),
    "overlapping": lambda a, b, at: (fit(a, at) * 1).flatten().unfold(0, 4, 2).sigmoid(),
    "diagonal": lambda a, b, at: fit(a, at).diagonal().exp().clamp(max=2),
    "flip": lambda a, b, at: fit(a, at).flip(0) * fit(b, at),
    "roll": lambda a, b, at: fit(a, at).roll(1, 1),
    "chunk": lambda a, b, at: fit(a, at).chunk(2, dim=1)[1].tanh(),
    "split": lambda a, b, at: torch.mul(*fit(a, at).split(at.width // 2, dim=1)),
    "unbind": lambda a, b, at: torch.stack(fit(a, at).unbind(1)[:3]).tanh(),
    "cat": lambda a, b, at: torch.cat([fit(a, at), fit(b, at)[: at.row]]).sigmoid(),
    "nothing": lambda a, b, at: fit(a, at)[:0].tanh(),
    "with_nothing": lambda a, b, at: torch.cat([fit(a, at)[:0].exp(), fit(b, at)]).tanh(),
}
INDEXING: dict[str, Function] = {
    "gather": lambda a, b, at: fit(a, at).gather(0, places(b, at)[:, None].expand(-1, at.width)),
    "index_select": lambda a, b, at: fit(a, at).index_select(0, places(b, at)),
    "index": lambda a, b, at: fit(a, at)[places(b, at)].tanh(),
    "take_along": lambda a, b, at: torch.take_along_dim(fit(a, at), fit(b, at).argsort(dim=0), dim=0),
    "chosen": lambda a, b, at: fit(a, at)[fit(b, at) > 0].tanh(),
    "scatter": lambda a, b, at: fit(a, at).scatter(0, places(b, at)[None, : at.width], 0.5),
    "index_add": lambda a, b, at: fit(a, at).index_add(0, places(b, at), fit(b, at)),
    "looked_up": lambda a, b, at: functional.embedding(places(b, at), fit(a, at)),
    "one_hot": lambda a, b, at: functional.one_hot(places(b, at), at.rows).float() @ fit(a, at),
}
IN_PLACE: dict[str, Function] = {
    "add_": lambda a, b, at: (fit(a, at) * 1.5).add_(fit(b, at)),
    "sigmoid_": lambda a, b, at: (fit(a, at) * 1.5).sigmoid_(),
    "relu_": lambda a, b, at: fit(a, at).clone().relu_(),
    "masked_fill_": lambda a, b, at: fit(a, at).clone().masked_fill_(fit(b, at) > 0.5, 0.25),
    "copy_": lambda a, b, at: torch.zeros_like(fit(a, at)).copy_(fit(b, at)).mul_(fit(a, at)),
    "index_put_": lambda a, b, at: fit(a, at).clone().index_put_((places(b, at),), fit(b, at)),
    "dropout_": lambda a, b, at: functional.dropout(fit(a, at).tanh().clone(), 0.3, inplace=True),
    "write_rows": write_rows,
    "write_a_view": write_a_view,
}
TYPES: dict[str, Function] = {
    "bf16": lambda a, b, at: real(a).bfloat16() * 1.5,
    "bf16_mul": lambda a, b, at: fit(a, at).bfloat16() * fit(b, at).bfloat16(),
    "half": lambda a, b, at: fit(a, at).half().tanh(),
    "double": lambda a, b, at: fit(a, at).double().sin() * fit(b, at).double(),
    "complex": lambda a, b, at: torch.complex(fit(a, at), fit(b, at)) * torch.complex(fit(b, at), fit(a, at)),
    "conjugate": lambda a, b, at: torch.complex(fit(a, at), fit(b, at)).conj() * 0.5,
    "polar": lambda a, b, at: torch.polar(fit(a, at), fit(b, at)),
    "imaginary": lambda a, b, at: torch.complex(fit(a, at), fit(b, at)).conj().imag * fit(b, at),
    "whole_numbers": lambda a, b, at: (fit(a, at) * 3).int() * fit(b, at),
}
OWN: dict[str, Function] = {
    "saves_inputs": lambda a, b, at: SavesInputs.apply(fit(a, at), fit(b, at)),
    "saves_output": lambda a, b, at: SavesOutput.apply(real(a)),
    "saves_middle": lambda a, b, at: SavesMiddle.apply(fit(a, at)),
    "changes_input": lambda a, b, at: ChangesInput.apply(fit(a, at) * 2),
    "marked": marked,
    "moved_whole": moved_whole,
}
FUNCTIONS = ELEMENTWISE | REDUCING | MATRIX | VIEWS | INDEXING | IN_PLACE | TYPES | OWN
