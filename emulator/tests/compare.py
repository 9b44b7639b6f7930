"""Running the same on the emulated NPU and on the CPU, and comparing."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_inputs(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def on(device: str, tensors: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, tensors)


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The result, and the gradients of a sum that weighs each of its elements differently."""
    for each in inputs:
        each.requires_grad_()
    result = function(*inputs)
    weights = torch.linspace(-1, 2, result.numel()).to(result.device, result.dtype)
    result.backward(weights.view(result.shape))
    return [result.detach(), *(each.grad for each in inputs if each.grad is not None)]


def assert_equal(npu: Any, cpu: Any, tolerance: float = 0) -> None:
    pairs = list(zip(tree_leaves(npu), tree_leaves(cpu), strict=True))
    assert pairs
    for ours, theirs in pairs:
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert ours == theirs


def constant(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(like.device)
