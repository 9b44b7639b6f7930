"""What copy and pickle take of a module that has something of ours: all but that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def reduced(module: torch.nn.Module, protocol: Any, take_out: Callable[[dict[str, Any]], None]) -> Any:
    """What the module's class reduces it to, for an `__reduce_ex__` of our own that stands before the class's.

    take_out: takes what else is ours out of a copy of the module's attributes.
    """
    whole = type(module).__reduce_ex__(module, protocol)
    if not isinstance(whole, tuple) or len(whole) < 3 or not isinstance(whole[2], dict):
        return whole
    state = {name: value for name, value in whole[2].items() if name != "__reduce_ex__"}
    take_out(state)
    return (*whole[:2], state, *whole[3:])
