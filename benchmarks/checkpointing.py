"""torch's own checkpoint around some layers of a model, which stay the modules that they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from torch.nn import Module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tiered_mem.activations.operators import is_dear

Kept = Literal["full", "selective"]


@contextmanager
def checkpointed(layers: Iterable[Module], kept: Kept) -> Iterator[None]:
    """Forwards inside compute these layers again in their backward, by torch's checkpoint that is not reentrant.

    kept: "full" keeps a layer's inputs alone, "selective" also the results of products, attention and convolutions:
    of the same operators as tiered_mem with recompute="cheap". Backward may come later, outside.
    """
    selective = {"context_fn": partial(create_selective_checkpoint_contexts, _choose)}
    options = selective if kept == "selective" else {}
    wrapped = list(layers)
    try:
        for layer in wrapped:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)
        yield
    finally:
        for layer in wrapped:
            vars(layer).pop("forward", None)


def same_numbers(layers: Iterable[Module]) -> bool:
    """Whether the layers may be computed twice. Batch norm has each batch in its statistics, and would twice."""
    names = (name for layer in layers for name, _ in layer.named_buffers())
    return not any(name.endswith("num_batches_tracked") for name in names)


def _choose(context: Any, operator: Any, *args: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_dear(operator) else CheckpointPolicy.PREFER_RECOMPUTE
