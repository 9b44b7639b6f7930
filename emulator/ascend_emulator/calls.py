"""Operators: found by name, their kernels on the NPU, and for a call its device and the tensors that it writes."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.library import Library
from torch.utils._pytree import tree_leaves


def find(name: str) -> OpOverload | None:
    """The operator of that name; None in other namespaces, and for a registration that has no operator."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    if namespace not in ("aten", "npu"):
        return None
    packet = getattr(getattr(torch.ops, namespace), base, None)
    operator = getattr(packet, overload or "default", None)
    return operator if isinstance(operator, OpOverload) else None


def npu_kernel(operator: OpOverload) -> Callable[..., Any]:
    """The kernel that it has on the NPU now."""
    kernel = torch.library.get_kernel(operator, "PrivateUse1")
    return partial(kernel.call_boxed, torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1))


def replace(library: Library, operator: OpOverload, kernel: Callable[..., Any], key: str = "PrivateUse1") -> None:
    """Gives it another kernel, on the NPU unless the dispatch key is another's. library: one for its namespace."""
    library.impl(operator, kernel, key, allow_override=True)  # type: ignore[no-untyped-call]


def device_of(arguments: Any) -> torch.device:
    """The NPU that the call is about: where its tensors are, or where it is told to make one."""
    leaves = tree_leaves(arguments)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "npu":
            return leaf.device
    for leaf in leaves:
        if isinstance(leaf, torch.device) and leaf.type == "npu":
            return leaf
    return torch.device("npu")


def written_arguments(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    """The tensors that it changes, by what its schema says."""
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
