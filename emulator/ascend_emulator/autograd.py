"""Derivatives of a formula by PyTorch's own, for operators of torch_npu whose derivative is an operator too."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def gradients(formula: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Those of the formula's result, which has this gradient, with respect to each of its inputs."""
    with _recording():
        leaves = [each.detach().requires_grad_() for each in inputs]
        return torch.autograd.grad(formula(*leaves), leaves, grad, materialize_grads=True)


@contextmanager
def _recording() -> Iterator[None]:
    """A kernel runs below autograd, which the dispatcher leaves out until the kernel has returned."""
    key = torch._C.DispatchKey.AutogradPrivateUse1
    left_out = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, left_out)
