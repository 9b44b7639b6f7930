"""Lets torchvision be imported where its compiled operators, which are made for one build of torch, do not load.

torchvision tolerates that they do not, but for two of which it says what they do to meta tensors: these must be
declared. A call of one is an error as it was. To be imported before torchvision, and what imports it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch.library import Library


def declared() -> Library | None:
    """The declarations, which last as long as this; None where the operators load, or there is no torchvision."""
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return None
    try:
        torch.ops.load_library(Path(package.origin).with_name("_C.so"))
        return None
    except OSError:
        library = Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library


DECLARED = declared()
