"""MindSpeed: a feature that is appended to its list. Run with MindSpeed of July 2026, without Megatron."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import wraps
from typing import Any

from mindspeed.features_manager.feature import MindSpeedFeature

from ..configuration import arguments_of, default_manager
from .tiering import refuse_others

# MindSpeed's own, which move what layers save for backward.
_OTHERS = ("swap_attention", "swap_layer_input", "smart_swap", "adaptive_recompute_device_swap")


class TieredMemoryFeature(MindSpeedFeature):
    """`--tiered-memory`: the activations of each of Megatron's model chunks move, by the default manager.

        MindSpeedFeaturesManager.FEATURES_LIST.append(TieredMemoryFeature())

    before `mindspeed.megatron_adaptor` is imported. The manager's arguments are the variables TIERED_MEM_*. The
    optimizer is Megatron's. Raises ValueError with another offloader on, and for a variable that means nothing.
    """

    def __init__(self) -> None:
        super().__init__("tiered-memory")

    def register_args(self, parser: ArgumentParser) -> None:
        group = parser.add_argument_group(title=self.feature_name)
        group.add_argument("--tiered-memory", action="store_true", help="activations rest on the host or on disk")

    def validate_args(self, args: Namespace) -> None:
        if args.tiered_memory:
            others = {"--" + each.replace("_", "-"): getattr(args, each, False) for each in _OTHERS}
            refuse_others(others, "--tiered-memory")
            arguments_of(os.environ)

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        patch_manager.register_patch("megatron.training.training.get_model", get_model_wrapper)


def get_model_wrapper(get_model: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """MindSpeed wraps by what is called a wrapper."""

    @wraps(get_model)
    def attached(*args: Any, **kwargs: Any) -> list[Any]:
        chunks = get_model(*args, **kwargs)
        for chunk in chunks:
            default_manager().attach(chunk)
        return chunks

    return attached
