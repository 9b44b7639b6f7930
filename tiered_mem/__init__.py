"""Asynchronous memory tiering for training on accelerators.

What needs torch is imported when it is first asked for. So the command line runs where torch does not load, and a
process that only reads spill files does not wait for torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from .errors import (
    ChangedTensor,
    Closed,
    CorruptRecord,
    DeviceFailed,
    DeviceUnavailable,
    InterruptedStep,
    NotRepeatable,
    Offloaded,
    OffloadRefused,
    OverlapRefused,
    PinningFailed,
    PolicyError,
    Reentered,
    SpillDirRefused,
    TieredMemError,
    TierFull,
)

if TYPE_CHECKING:
    from . import optim
    from .activations.contexts import OffloadContext
    from .allocators.base import OutOfHostMemory
    from .block_context import async_save_on_cpu
    from .configuration import configure, default_manager
    from .manager import TieringManager
    from .policies.planning.profile import BudgetTooSmall
    from .versions import __version__ as __version__

__all__ = [
    "BudgetTooSmall",
    "ChangedTensor",
    "Closed",
    "CorruptRecord",
    "DeviceFailed",
    "DeviceUnavailable",
    "InterruptedStep",
    "NotRepeatable",
    "OffloadContext",
    "OffloadRefused",
    "Offloaded",
    "OutOfHostMemory",
    "OverlapRefused",
    "PinningFailed",
    "PolicyError",
    "Reentered",
    "SpillDirRefused",
    "TierFull",
    "TieredMemError",
    "TieringManager",
    "async_save_on_cpu",
    "configure",
    "default_manager",
    "optim",
]

_ON_REQUEST = {
    "BudgetTooSmall": ".policies.planning.profile",
    "OffloadContext": ".activations.contexts",
    "OutOfHostMemory": ".allocators.base",
    "TieringManager": ".manager",
    "__version__": ".versions",
    "async_save_on_cpu": ".block_context",
    "configure": ".configuration",
    "default_manager": ".configuration",
}
_MODULES = ("allocators", "optim", "policies")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ON_REQUEST, *_MODULES})


# A type checker that saw this would take any name for one of the package's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return importlib.import_module(f".{name}", __name__)
        if name not in _ON_REQUEST:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(_ON_REQUEST[name], __name__)
        except RuntimeError as error:
            # A backend that torch loads of its own accord has failed, and torch with it, in 30 lines.
            if "torch" in sys.modules or error.__cause__ is None:
                raise
            what = str(error).partition(". ")[0]
            why = " ".join(str(error.__cause__).split())
            raise DeviceUnavailable(
                f"torch does not load: {what} ({why}). Repair that package, or set "
                "TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment to go without it"
            ) from None
        value = globals()[name] = getattr(module, name)
        return value
