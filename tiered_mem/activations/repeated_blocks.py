"""Finds the layers of a model."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The model's layers: the modules of one of its ModuleLists, or of a Sequential whose modules have one type.

    Of several the one with the most parameters counts; lists inside a layer do not. Raises ValueError where none
    has two modules or more.
    """
    runs = list(_runs(model))
    if not runs:
        raise ValueError(
            f"the layers of {type(model).__name__} are unknown: it has no ModuleList, nor a Sequential of modules "
            "of one type, with two modules or more. Name them, as in offload_context(model.layers)"
        )
    return max(runs, key=_parameters)


def _runs(module: torch.nn.Module) -> Iterator[list[torch.nn.Module]]:
    children = list(module.children())
    alike = len({type(child) for child in children}) == 1
    listed = isinstance(module, torch.nn.ModuleList) or (isinstance(module, torch.nn.Sequential) and alike)
    if listed and len(children) > 1 and _parameters(children) > 0:
        yield children
        return
    for child in children:
        yield from _runs(child)


def _parameters(blocks: list[torch.nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())
