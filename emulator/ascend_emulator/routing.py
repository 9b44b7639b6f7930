"""Where a mixture of experts sends its tokens in a dry run, which has no scores: to each expert as many."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.library import Library

from ascend_emulator.calls import npu_kernel, replace

# What an operator gives, or None where that is not known.
Answer: TypeAlias = Callable[..., torch.Tensor | None]


class UniformRouting:
    """Tells of how many rows `nonzero` and `bincount` are that ask for the outcome of the last `topk`.

    That one is taken for the router's: its dimension has an element for each expert, its indices are the choices.
    Where their number is no multiple of the experts', some have one more than others.
    """

    def __init__(self) -> None:
        self._experts = 0
        self._choices = 0
        self._asked = 0

    def install(self, library: Library) -> None:
        """library: one for the namespace aten."""
        for operator, made in (
            (torch.ops.aten.topk.default, self._topk),
            (torch.ops.aten._grouped_mm.default, self._grouped_mm),
        ):
            replace(library, operator, made(npu_kernel(operator)))

    def nonzero(self, mask: torch.Tensor) -> torch.Tensor | None:
        """The indices, of which there are as many as uniform routing makes; None where the mask is another's.

        mask: whether each expert has any choice, or which choices are one expert's. An expert that no choice names
            may follow the others.
        """
        if self._choices and mask.numel() == self._choices:
            number = self._asked % self._experts
            self._asked += 1
            rows = self._choices * (number + 1) // self._experts - self._choices * number // self._experts
        elif self._choices and mask.dim() == 1 and mask.numel() in (self._experts, self._experts + 1):
            rows = min(self._experts, self._choices)
        else:
            return None
        return torch.empty((rows, mask.dim()), dtype=torch.int64, device=mask.device)

    def bincount(
        self, choices: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
    ) -> torch.Tensor | None:
        """The counts, for each expert one; None for other numbers than the choices."""
        if not self._choices or choices.numel() != self._choices:
            return None
        dtype = torch.int64 if weights is None else torch.float64
        return torch.empty(max(minlength, self._experts), dtype=dtype, device=choices.device)

    def _topk(self, native: Callable[..., Any]) -> Callable[..., Any]:
        def topk(
            scores: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
        ) -> tuple[torch.Tensor, torch.Tensor]:
            values, indices = native(scores, k, dim, largest, sorted)
            self._experts, self._choices, self._asked = scores.size(dim), indices.numel(), 0
            return values, indices

        return topk

    def _grouped_mm(self, products: Callable[..., Any]) -> Callable[..., Any]:
        """products: PyTorch's own, one product for each group. It asks the device where the groups end."""

        def grouped_mm(
            first: torch.Tensor,
            second: torch.Tensor,
            offs: torch.Tensor | None = None,
            bias: torch.Tensor | None = None,
            out_dtype: torch.dtype | None = None,
        ) -> Any:
            ends = None
            if offs is not None:
                # What the groups share: the rows, the inner dimension, or the columns.
                shared = first.size(0 if second.dim() == 3 else 1) if first.dim() == 2 else second.size(-1)
                groups = offs.numel()
                ends = offs.cpu()  # which waits for the device, as PyTorch does
                ends.copy_(torch.tensor([shared * (group + 1) // groups for group in range(groups)]))
            return products(first, second, ends, bias, out_dtype)

        return grouped_mm
