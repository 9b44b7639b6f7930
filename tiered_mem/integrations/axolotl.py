"""axolotl: a plugin, which a configuration lists in `plugins`. Run with axolotl 0.19."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, Field

from .tiering import refuse_others
from .transformers import TieringCallback


class TieringPlugin(BasePlugin):
    """Tiers a training by transformers' callback:

        plugins: [tiered_mem.integrations.axolotl.TieringPlugin]
        tiered_mem: {optimizer: host, host_bytes: 200GiB}

    What is under `tiered_mem` are the arguments of TieringCallback. Raises ValueError with axolotl's own
    `activation_offloading` on.
    """

    def get_input_args(self) -> str:
        return f"{__name__}.{TieringArguments.__name__}"

    def add_callbacks_post_trainer(self, cfg: Any, trainer: object) -> list[TieringCallback]:
        offloading = cfg.activation_offloading
        refuse_others({f"activation_offloading: {offloading}": offloading}, "TieringPlugin")
        return [TieringCallback(**cfg.tiered_mem or {})]


class TieringArguments(BaseModel):
    """What the plugin adds to axolotl's configuration."""

    tiered_mem: dict[str, Any] = Field(default_factory=lambda: {"optimizer": "host"})
