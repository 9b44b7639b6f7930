"""What torch tells of a tensor without a look at its elements."""

from __future__ import annotations

from typing import Any

import torch

_T: Any = torch.Tensor
SET_GRADIENT = _T.grad.__set__
GET_GRADIENT = _T.grad.__get__
# What autograd knows of a tensor, and its type.
HARMLESS = frozenset(
    [
        *(each.__get__ for each in (_T.requires_grad, _T.is_leaf, _T.grad_fn, _T.retains_grad)),
        *(_T.requires_grad.__set__, _T.requires_grad_, _T.register_hook, _T.register_post_accumulate_grad_hook),
        *(each.__get__ for each in (_T.dtype, _T.device, _T.layout, _T.is_cpu, _T.is_cuda, _T.is_sparse)),
        *(_T.is_floating_point, _T.is_complex, _T.is_inference, torch.is_floating_point, torch.is_complex),
    ]
)
# What only its shape says.
OF_SHAPE = frozenset(
    [
        *(each.__get__ for each in (_T.shape, _T.ndim, _T.nbytes, _T.itemsize)),
        *(_T.size, _T.stride, _T.is_contiguous, _T.dim, _T.ndimension, _T.__len__),
        *(_T.numel, _T.nelement, torch.numel, _T.element_size),
    ]
)
