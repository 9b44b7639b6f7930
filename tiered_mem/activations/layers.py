"""The layers of a model: found by its structure, and followed as they run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from torch.nn import Module, ModuleList, Sequential

from ..device.torch_private import tree_leaves
from ..policies.actions import How
from .hooks import ForwardPass, computes_again, is_checkpoint, refuse_rivals
from .operators import tensors_among
from .recompute import RecomputedCall, Recomputer

_log = logging.getLogger("tiered_mem.activations")


class LayersUnknown(ValueError):
    """A model shows no layers by its structure. why: in words, without what helps."""

    def __init__(self, model: Module) -> None:
        self.why = (
            f"the layers of {type(model).__name__} are unknown: it has no ModuleList or Sequential of modules with "
            "weights"
        )
        super().__init__(f"{self.why}. Name them, as in offload_context(model.layers)")


class Run(NamedTuple):
    """Modules that run one after the other, and the name of what holds them: "encoder.layers"; "" is the model."""

    name: str
    layers: list[Module]

    def __str__(self) -> str:
        kinds = Counter(type(layer).__name__ for layer in self.layers)
        counts = " and ".join(f"{count} {kind}" for kind, count in kinds.items())
        return f"{counts} of {self.name}" if self.name else counts


def repeated_blocks(model: Module) -> list[Module]:
    """The model's layers: the modules of all its runs of repeated blocks. A line of the log says which.

    A run is a ModuleList, or a Sequential of modules of one type, in which two or more have weights and modules of
    their own. Lists inside a layer are its own affair; a layer that is itself such a list stands for what is in it.
    So do the stages of a pyramid, layers that all have runs inside and of which the largest has more than twice the
    weights of the smallest. A model has several runs where it has an encoder and a decoder, towers, or stages.

    Where there is none, a run may also be of modules such as Linear, or a ModuleList of one block, which the model
    may call repeatedly. Where that finds none either, the modules of a Sequential may be of different types.

    Raises LayersUnknown where nothing is found.
    """
    for suits in (_is_run_of_blocks, _is_run, _is_sequence):
        runs = list(_runs("", model, suits))
        if runs:
            _log.info("the layers of %s are %s", type(model).__name__, ", ".join(map(str, runs)))
            return list(dict.fromkeys(chain.from_iterable(run.layers for run in runs)))
    raise LayersUnknown(model)


def parts_around(model: Module, layers: Iterable[Module]) -> list[Module]:
    """The model's modules that have layers inside, the model with them. Not lists, which nobody calls."""
    found = set(layers)
    return [
        part
        for part in model.modules()
        if part not in found and _can_be_called(part) and not found.isdisjoint(part.modules())
    ]


class LayerCalls:
    """Follows which layers of a forward are running, and whether what they save comes to it.

    A layer inside another one interrupts it. One that is computed again in backward does not begin there.

    recompute: how a layer is computed again of which the policy says nothing.
    """

    def __init__(self, forward: ForwardPass, recomputer: Recomputer, recompute: How | None) -> None:
        self.forward = forward
        self._recomputer = recomputer
        self._recompute = recompute
        self._running: list[LayerCall] = []
        self._came = False

    @property
    def running(self) -> bool:
        """Whether any layer is."""
        return bool(self._running)

    def begin(self, module: Module, args: Sequence[object], named: Mapping[str, object]) -> None:
        """A layer begins, with these arguments. Raises ValueError inside of another offloader."""
        refuse_rivals()
        if computes_again():
            return
        forward = self.forward
        call = LayerCall(module, forward.begin_layer((*args, *named.values())))
        self._running.append(call)
        if (how := forward.recompute or self._recompute) is not None:
            call.recomputed = self._recomputer.begin(how, forward, call.layer, module, args, named)
        elif forward.keeps:
            forward.stand_aside(call.layer)

    def end(self, module: Module, output: object) -> None:
        """A layer has ended. One that has not begun, as somebody else's hook raised before, ends nothing."""
        if all(module is not call.module for call in self._running) or computes_again():
            return
        # What an interrupt ended in between, before it was inside of its own forward, is over as well.
        while (ended := self._running.pop()).module is not module:
            ended.leave(None)
        forward, recomputed = self.forward, ended.recomputed
        ended.leave(output)
        if recomputed is not None and output is not None:
            results, unsaved = recomputed.results
            forward.computes_again(ended.layer, trial=recomputed.is_trial, results=results, unsaved=unsaved)
        self._came = self._came or forward.saver == ended.layer
        if self._came or is_checkpoint():
            forward.elsewhere = False
        elif forward.aside is None:
            forward.elsewhere = forward.elsewhere or _has_graph(output)
        forward.end_layer(ended.layer)
        forward.resume_layer(self._running[-1].layer if self._running else None)

    def break_off(self) -> None:
        """What runs has ended, and no hook has heard of it."""
        while self._running:
            self._running.pop().leave(None)
        self.forward.come_back()


class LayerCall:
    """A call of a layer that runs: its number in the forward, and how it is computed again, if it is."""

    __slots__ = ("layer", "module", "recomputed")

    def __init__(self, module: Module, layer: int) -> None:
        self.module = module
        self.layer = layer
        self.recomputed: RecomputedCall | None = None

    def leave(self, output: object) -> None:
        """It has ended; without an output it has failed."""
        recomputed, self.recomputed = self.recomputed, None
        if recomputed is not None:
            recomputed.end(output)


def _runs(name: str, module: Module, suits: Callable[[Module, list[Module]], bool]) -> Iterator[Run]:
    layers = list(module.children())
    if _has_weights(module) and suits(module, layers):
        inside = [[each for run in _runs("", layer, suits) for each in run.layers] for layer in layers]
        opened = all(inside) and _grows(layers)
        layer_by_layer = [
            blocks if blocks and (opened or _is_list(layer)) else [layer]
            for layer, blocks in zip(layers, inside, strict=True)
        ]
        yield Run(name, list(chain.from_iterable(layer_by_layer)))
        return
    for child_name, child in module.named_children():
        yield from _runs(f"{name}.{child_name}" if name else child_name, child, suits)


def _is_run_of_blocks(module: Module, layers: list[Module]) -> bool:
    return _is_uniform(module, layers) and sum(map(_is_block, layers)) > 1


def _is_run(module: Module, layers: list[Module]) -> bool:
    return _is_uniform(module, layers) and (len(layers) > 1 or any(map(_is_block, layers)))


def _is_sequence(module: Module, layers: list[Module]) -> bool:
    return isinstance(module, Sequential) and len(layers) > 1


def _is_uniform(module: Module, layers: list[Module]) -> bool:
    if isinstance(module, Sequential):
        return len(layers) > 1 and len(set(map(type, layers))) == 1
    return isinstance(module, ModuleList)


def _is_list(module: Module) -> bool:
    return isinstance(module, ModuleList | Sequential)


def _is_block(module: Module) -> bool:
    return _has_weights(module) and next(module.children(), None) is not None


def _can_be_called(module: Module) -> bool:
    return type(module).forward is not Module.forward or "forward" in vars(module)


def _grows(stages: list[Module]) -> bool:
    sizes = [sum(weight.numel() for weight in stage.parameters()) for stage in stages]
    return max(sizes) > 2 * min(sizes)


def _has_weights(module: Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_graph(output: object) -> bool:
    """Whether a layer's output is of use to backward, for which the layer has to have saved something."""
    return any(each.grad_fn is not None for each in tensors_among(tree_leaves(output)))
