"""What the frameworks' callbacks have in common: a manager for each training, and the layers of its model."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.nn import Module, ModuleList, Sequential

from ..activations.model_layers import LayersUnknown
from ..manager import TieringManager

T = TypeVar("T")
Layers = Iterable[Module] | str | None
"""The modules whose activations move, or the name of what holds them in the model; None is the repeated blocks."""

_log = logging.getLogger("tiered_mem.integrations")


class Tiering:
    """A callback's arguments, and the manager of the training that runs.

    layers: see `Layers`. min_bytes: as for TieringManager.offload_context(). arguments: those of TieringManager.

    Raises TypeError for an argument that TieringManager does not take.
    """

    def __init__(self, layers: Layers, min_bytes: int | str | None, arguments: dict[str, Any]) -> None:
        inspect.signature(TieringManager).bind_partial(**arguments)
        self._layers = layers
        self._min_bytes = min_bytes
        self._arguments = arguments
        self.current: TieringManager | None = None

    def manager(self, device: torch.device) -> TieringManager:
        """The manager of the training that runs, or comes next. device: where none was named."""
        if self.current is None:
            arguments = {"device": device, **self._arguments}
            if "policy" in arguments:
                # It serves one manager, and each training has its own.
                arguments["policy"] = copy.deepcopy(arguments["policy"])
            self.current = TieringManager(**arguments)
        return self.current

    def follow(self, model: Module, make: Callable[..., T]) -> T | None:
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

    def close(self) -> None:
        """The training is over, and its manager is closed."""
        manager, self.current = self.current, None
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
