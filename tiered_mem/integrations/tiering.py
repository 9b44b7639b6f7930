"""What the frameworks' callbacks have in common: arguments, a manager for each training, and whom they refuse."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.nn import Module, ModuleList, Sequential

from ..activations.layers import LayersUnknown
from ..manager import TieringManager
from ..optimizer.registered import Overlap, Residency
from ..optimizer.tiered_optimizer import TieredOptimizer

T = TypeVar("T")
Layers = Iterable[Module] | str | None
"""The modules whose activations move, or the name of what holds them in the model; None is the repeated blocks."""

_log = logging.getLogger("tiered_mem.integrations")


class Tiering:
    """The part of a callback that knows no framework.

    optimizer: where the optimizers' states rest between steps, as in `register_optimizer`; None leaves them alone.
    overlap: what their steps go on beside, as there.
    layers: the modules whose activations move, or what holds them in the model: a name such as "model.layers". None
        is the model's repeated blocks; a model without any is told of, and its activations stay.
    min_bytes: as for TieringManager.offload_context().
    arguments: those of TieringManager; the device is the framework's by default.

    Raises TypeError for an argument that TieringManager does not take. A training raises ValueError when it begins
    with another offloader on, or a name that the model does not know.
    """

    def __init__(
        self,
        *,
        optimizer: Residency | None = None,
        overlap: Overlap | None = None,
        layers: Layers = None,
        min_bytes: int | str | None = None,
        **arguments: Any,
    ) -> None:
        inspect.signature(TieringManager).bind_partial(**arguments)
        self._residency = optimizer
        self._overlap = overlap
        self._layers = layers
        self._min_bytes = min_bytes
        self._arguments = arguments
        self._manager: TieringManager | None = None

    def manager(self, device: torch.device) -> TieringManager:
        """The manager of the training that runs, or comes next. device: where none was named."""
        if self._manager is None:
            arguments = {"device": device, **self._arguments}
            if "policy" in arguments:
                # It serves one manager, and each training has its own.
                arguments["policy"] = copy.deepcopy(arguments["policy"])
            self._manager = TieringManager(**arguments)
        return self._manager

    def _follow(self, model: Module, make: Callable[..., T]) -> T | None:
        """What `make` returns for the layers of a model. None, and a warning, where the model shows no layers.

        make: takes `layers`, which is None for those that it finds by itself, and `min_bytes`.

        Raises what `make` does, and ValueError for a name that the model does not know.
        """
        try:
            return make(layers=self._layers_of(model), min_bytes=self._min_bytes)
        except LayersUnknown as error:
            _log.warning(
                "activations stay on the device, as %s. Name them: TieringCallback(layers=model.blocks)", error.why
            )
            return None

    def _tiered(self, optimizer: torch.optim.Optimizer, manager: TieringManager) -> torch.optim.Optimizer:
        """One with its states in the pool, unless it is tiered already, or is to be left alone."""
        if self._residency is None or isinstance(optimizer, TieredOptimizer):
            return optimizer
        return manager.register_optimizer(optimizer, residency=self._residency, overlap=self._overlap)

    def _given_back(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The plain one, where it is the training's manager that has its states."""
        if isinstance(optimizer, TieredOptimizer) and optimizer.manager is self._manager:
            return optimizer.give_back()
        return optimizer

    def _close(self) -> None:
        """The training is over, and its manager is closed."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()

    def _layers_of(self, model: Module) -> list[Module] | None:
        if self._layers is None:
            return None
        if not isinstance(self._layers, str):
            return list(self._layers)
        try:
            found = model.get_submodule(self._layers)
        except AttributeError as error:
            raise ValueError(f"layers={self._layers!r} is no module of {type(model).__name__}: {error}") from None
        return list(found) if isinstance(found, ModuleList | Sequential) else [found]


def refuse_others(settings: Mapping[str, object], ours: str) -> None:
    """Raises ValueError where others would move the same tensors. settings: by these, where they are on."""
    on = [setting for setting, is_on in settings.items() if is_on]
    if on:
        others = " and ".join(on)
        raise ValueError(f"{others} and {ours} would both move the same tensors: leave out one of the two")
