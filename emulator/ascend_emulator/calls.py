"""Operators, and what a call of one is about: which device, and which of its arguments it writes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload
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
