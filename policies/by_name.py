"""The policies that have a name."""

from __future__ import annotations

from .base import Policy
from .layer_order import LayerOrderPolicy
from .lru import LRUPolicy


def policy_by_name(name: str, *, device_bytes: int | None = None) -> Policy:
    """A policy with its default arguments; "lru" with so many bytes, or its own default. ValueError if unknown."""
    match name:
        case "layer-order":
            return LayerOrderPolicy()
        case "lru":
            return LRUPolicy() if device_bytes is None else LRUPolicy(device_bytes)
    raise ValueError(f"unknown policy {name!r}; known are 'auto', 'layer-order', 'lru'")
