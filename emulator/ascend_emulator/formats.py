"""Private formats, in which CANN lays out tensors for its matrix unit: here a storage's label.

The data stay in their plain order, which every kernel reads. What the format is, and how large the storage, is what
torch_npu would say. A cast to another format is a copy, as by CANN.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch_npu  # type: ignore[import-untyped]
from torch import Tensor

from ascend_emulator.calls import find, npu_kernel

_ND, _NC1HWC0, _FRACTAL_NZ = 2, 3, 29
_PLAIN = (0, 1, _ND, 27, 30)  # the others: NCHW, NHWC, NDHWC and NCDHW
_LABEL = "_ascend_emulator_format"


def allowed() -> bool:
    """Whether the program lets torch_npu use private formats; otherwise it keeps the plain ones."""
    return bool(torch_npu._C._npu_getOption("ALLOW_INTERNAL_FORMAT") != b"disable")


def are_plain(input: Tensor, acl_format: int, *args: Any, **kwargs: Any) -> bool:
    """Both, of a cast from one to the other."""
    return acl_format in _PLAIN and _label(input) is None


def cast(input: Tensor, acl_format: int, *args: Any, **kwargs: Any) -> Tensor:
    """A copy in another format, of which one at least is private. Where those are not allowed it is a plain one."""
    if _label(input) == acl_format:
        return input
    base = input if input._base is None else input._base
    if acl_format == _FRACTAL_NZ and base.dim() < 2:
        acl_format = _ND
    if acl_format in _PLAIN:
        plain: Tensor = torch.ops.npu._npu_format_cast(
            input.clone(memory_format=torch.contiguous_format), acl_format
        )
        return plain
    if not allowed():
        made: Tensor = torch_npu.unsafe_empty_with_format(
            input.shape, dtype=input.dtype, device=input.device, acl_format=acl_format
        )
        return made.copy_(input)
    storage = torch.empty(_elements(input, acl_format), dtype=input.dtype, device=input.device).untyped_storage()
    setattr(storage, _LABEL, acl_format)
    made = torch.empty(0, dtype=input.dtype, device=input.device)
    contiguous = torch.empty(input.shape, device="meta").stride()
    return made.set_(storage, 0, input.shape, contiguous).copy_(input)


def cast_(input: Tensor, acl_format: int, *args: Any, **kwargs: Any) -> Tensor:
    made = cast(input, acl_format) if allowed() else input
    return input if made is input else input.set_(made.untyped_storage(), 0, made.shape, made.stride())


def cast_if_other(input: Tensor, acl_format: int, **kwargs: Any) -> Tensor:
    """As torch_npu's own, which would take a label's tensor for a plain one."""
    npu = torch.ops.npu
    return input if npu.get_npu_format(input) == acl_format else npu._npu_format_cast(input, acl_format)


def cast_like(input: Tensor, dst: Tensor, **kwargs: Any) -> Tensor:
    return cast_if_other(input, torch.ops.npu.get_npu_format(dst))


def format_of() -> Callable[[Tensor], int]:
    operator = find("npu::get_npu_format")
    assert operator is not None
    plain = npu_kernel(operator)

    def told(input: Tensor) -> int:
        label = _label(input)
        return int(plain(input)) if label is None else label

    return told


def _label(input: Tensor) -> int | None:
    return getattr(input.untyped_storage(), _LABEL, None)


def _elements(input: Tensor, acl_format: int) -> int:
    """With those that CANN adds: the last two dimensions in blocks of 16 by 32 bytes, or channels by 16."""
    if acl_format == _FRACTAL_NZ and input.dim() >= 2:
        *batch, rows, columns = input.shape
        width = 32 // min(input.element_size(), 2)
        return math.prod(batch) * math.ceil(rows / 16) * 16 * math.ceil(columns / width) * width
    if acl_format == _NC1HWC0 and input.dim() == 4:
        images, channels, height, width = input.shape
        return images * math.ceil(channels / 16) * 16 * height * width
    return input.numel()


FORMATS: dict[str, Callable[..., Any]] = {
    "npu::_npu_format_cast.aclnn": cast,
    "npu::_npu_format_cast.input_dtype": cast,
    "npu::npu_format_cast": cast_if_other,
    "npu::npu_format_cast.Tensor": cast_like,
}
