"""ms-swift: `tiered_mem` in its maps of callbacks and of optimizers. Run with ms-swift 4.6.

Name a file in `--external_plugins` that has the one line `import tiered_mem.integrations.swift`, in a folder of its
own: ms-swift puts that folder before all others that Python imports from. Then `--callbacks tiered_mem` moves
activations, and `--optimizer tiered_mem` the states of the optimizer that `--optim` chooses. The arguments of the
manager are the variables TIERED_MEM_*.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from swift.callbacks import callbacks_map
from swift.optimizers import OptimizerCallback, optimizers_map

from ..configuration import arguments_of
from .transformers import TieringCallback

NAME = "tiered_mem"


class SwiftCallback(TieringCallback):
    """transformers' callback, as ms-swift makes one."""

    def __init__(self, args: Any, trainer: Any) -> None:
        both = args.optimizer == NAME
        super().__init__(optimizer="host" if both else None, **arguments_of(os.environ))


class SwiftOptimizers(OptimizerCallback):
    """The optimizer that ms-swift would make, tiered from its making on. Raises ValueError without our callback."""

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        ours = [each for each in self.trainer.callback_handler.callbacks if isinstance(each, SwiftCallback)]
        if not ours:
            raise ValueError(f"--optimizer {NAME} needs the callback, too: add --callbacks {NAME}")
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if self.trainer.is_fsdp_enabled or self.trainer.is_deepspeed_enabled:
            return optimizer  # the callback comes after the parameters are sharded, and sees to it
        return ours[0].manager(self.args.device).register_optimizer(optimizer)


callbacks_map[NAME] = SwiftCallback
optimizers_map[NAME] = SwiftOptimizers
