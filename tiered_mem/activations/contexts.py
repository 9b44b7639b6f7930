"""Makes a manager's offload contexts, and checks what it is given for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from ..device.device import Device
from ..ground.arguments import instance, items, whole_number, yes_or_no
from ..ground.interrupts import Interrupts
from ..ground.stats import Counters
from ..policies import ManualPolicy, PlannedPolicy, Policy
from ..sizes import format_bytes, parse_bytes
from .attachment import Attachment, Followed, is_attached
from .driver import Activations
from .layer_context import LayerContext, LayerSequence
from .layers import repeated_blocks
from .model_forwards import ModelForwards
from .movable import Movable, Stayed
from .offload_context import OffloadContext

# What is smaller stays, as a rule: each copy costs the host as much as one of many MiB.
_LARGE = 1 << 20


class Contexts:
    """Contexts for the activations of one manager. Arguments and errors are those of TieringManager.

    disk_bytes: what the tier below the host has room for; None where there is none.
    """

    def __init__(
        self,
        activations: Activations,
        policy: Policy,
        device: Device,
        disk_bytes: int | None,
        counters: Counters,
        interrupts: Interrupts,
    ) -> None:
        self._activations = activations
        self._policy = policy
        self._device = device
        self._disk_bytes = disk_bytes
        self._counters = counters
        self._interrupts = interrupts
        self._followed: list[weakref.ref[Followed]] = []
        self._of_blocks: dict[tuple[object, int, int | str | None], LayerContext] = {}

    def of_layers(
        self, layers: Iterable[torch.nn.Module] | torch.nn.Module, *, min_bytes: int | str | None
    ) -> OffloadContext:
        """For layers that the user names, or for a model's own."""
        if isinstance(layers, torch.nn.Module) and not isinstance(layers, torch.nn.ModuleList):
            return self._of_model(layers, layers=repeated_blocks(layers), min_bytes=min_bytes)
        modules = [instance("layers", layer, torch.nn.Module) for layer in items("layers", layers)]
        self._policy.check(len(modules))
        movable = self.movable(modules, min_bytes=min_bytes)
        return OffloadContext(self._activations, modules, movable, whole=False)

    def attach(
        self,
        model: torch.nn.Module,
        *,
        layers: Iterable[torch.nn.Module] | None = None,
        min_bytes: int | str | None,
    ) -> Attachment:
        """For each forward of a model."""
        instance("model", model, torch.nn.Module)
        if layers is None:
            named = repeated_blocks(model)
        else:
            named = [instance("layers", layer, torch.nn.Module) for layer in layers]
        if any(map(is_attached, (model, *named))):
            raise ValueError(f"this {type(model).__name__} is attached already: remove() that attachment first")
        places = [weakref.ref(layer) for layer in named]
        followed = Followed(model, named, partial(self._forwards_of, layers=places, min_bytes=min_bytes))
        self._interrupts.tell(followed)
        self._followed = [each for each in self._followed if each() is not None] + [weakref.ref(followed)]
        return Attachment(followed)

    def close(self) -> None:
        """No model is attached any more."""
        for each in self._followed:
            if (followed := each()) is not None:
                followed.stop()

    def of_loop(self, num_layers: int, *, min_bytes: int | str | None, variable_depth: bool) -> LayerContext:
        """For a loop of the user's own."""
        whole_number("num_layers", num_layers, at_least=1)
        yes_or_no("variable_depth", variable_depth)
        self._policy.check(num_layers)
        movable = self.movable(min_bytes=min_bytes)
        return LayerContext(LayerSequence(self._activations, movable, num_layers, variable_depth=variable_depth))

    def of_blocks(self, group: object, depth: int, *, min_bytes: int | str | None) -> LayerContext:
        """For a loop over blocks that say their numbers: the same one each time."""
        loop = group, depth, min_bytes
        if loop not in self._of_blocks:
            self._of_blocks[loop] = self.of_loop(depth, min_bytes=min_bytes, variable_depth=True)
        return self._of_blocks[loop]

    def movable(
        self,
        layers: Sequence[torch.nn.Module] = (),
        *,
        others: Sequence[torch.nn.Module] = (),
        min_bytes: int | str | None = 1,
        min_elements: int = 1,
        replaced: Callable[[], bool] = lambda: False,
    ) -> Movable:
        """What judges saved tensors for one context. Raises ValueError where no block would fit the disk tier.

        min_bytes: None is 1 MiB, and less where that fills the device.
        replaced: whether the model has no layer any more of these.
        """
        weights = (weight for layer in layers for weight in layer.parameters())
        self._device.check_some_here("the parameters of the layers", weights)
        nbytes = _LARGE if min_bytes is None else parse_bytes(min_bytes, "min_bytes")
        if self._disk_bytes is not None and self._disk_bytes < nbytes:
            raise ValueError(
                f"spill_bytes is {format_bytes(self._disk_bytes)}, and no block is below min_bytes, which "
                f"is {format_bytes(nbytes)}: none would fit. Raise the one or lower the other"
            )
        silent = isinstance(self._policy, ManualPolicy | PlannedPolicy)
        stayed = Stayed(self._counters.stayed, silent=silent, replaced=replaced)
        lacks = self._policy.lacks if min_bytes is None else None
        return Movable(
            self._device,
            layers,
            stayed,
            others=others,
            min_bytes=nbytes,
            min_elements=min_elements,
            lacks=lacks,
        )

    def _of_model(
        self, model: torch.nn.Module, *, layers: list[torch.nn.Module], min_bytes: int | str | None
    ) -> OffloadContext:
        movable = self._movable_of(model, layers, min_bytes)
        return OffloadContext(self._activations, layers, movable, whole=True)

    def _forwards_of(
        self, model: torch.nn.Module, *, layers: Sequence[weakref.ref[torch.nn.Module]], min_bytes: int | str | None
    ) -> ModelForwards:
        alive = [layer for each in layers if (layer := each()) is not None]
        return ModelForwards(self._activations, self._movable_of(model, alive, min_bytes), len(alive))

    def _movable_of(
        self, model: torch.nn.Module, layers: list[torch.nn.Module], min_bytes: int | str | None
    ) -> Movable:
        self._policy.check(len(layers))
        inside = {module for layer in layers for module in layer.modules()}
        others = [module for module in model.modules() if module not in inside]
        places = [weakref.ref(layer) for layer in layers]
        replaced = partial(_are_replaced, weakref.ref(model), places)
        return self.movable(layers, others=others, min_bytes=min_bytes, replaced=replaced)


def _are_replaced(model: weakref.ref[torch.nn.Module], layers: Sequence[weakref.ref[torch.nn.Module]]) -> bool:
    alive = model()
    return alive is not None and set(alive.modules()).isdisjoint(layer() for layer in layers)
