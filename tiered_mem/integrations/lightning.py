"""Lightning: a callback that tiers a fit, and the NPU, which Lightning does not know. Run with lightning 2.6."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator

from ..activations.contexts import OffloadContext
from .tiering import Tiering, refuse_others


class LightningCallback(Tiering, Callback):
    """Tiers a fit: `Trainer(..., callbacks=[TieringCallback(optimizer="host")])`. `Tiering` has the arguments.

    What each training step saves before its first backward moves. When the fit ends, by an error too, the
    optimizers are as they were.
    """

    _context: OffloadContext | None = None
    _entered = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        offload = getattr(strategy, "cpu_offload", None)  # of the FSDP strategies
        offloads = getattr(offload, "offload_params", offload)
        refuse_others({f"{type(strategy).__name__}(cpu_offload=...)": offloads}, "TieringCallback")
        manager = self.manager(pl_module.device)

        def context(layers: list[torch.nn.Module] | None, min_bytes: int | str | None) -> OffloadContext:
            return manager.offload_context(pl_module if layers is None else layers, min_bytes=min_bytes)

        self._context = self._follow(pl_module, context)
        if self._residency is not None:
            strategy.optimizers = [self._tiered(each, manager) for each in strategy.optimizers]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        if self._context is not None:
            self._context.__enter__()
            self._entered = True

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._leave()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *outputs: Any) -> None:
        self._leave()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave()
        self._end(trainer)

    def _leave(self) -> None:
        entered, self._entered = self._entered, False
        if entered and self._context is not None:
            self._context.__exit__(None, None, None)

    def _end(self, trainer: Trainer) -> None:
        self._context = None
        if self._manager is None:
            return
        trainer.strategy.optimizers = [self._given_back(each) for each in trainer.strategy.optimizers]
        self._close()


# By the name that users know it by, and transformers' callback too.
TieringCallback = LightningCallback


class NPUAccelerator(Accelerator):
    """An Ascend NPU: `Trainer(accelerator=NPUAccelerator(), devices=1)`."""

    def setup_device(self, device: torch.device) -> None:
        torch.npu.set_device(device)  # type: ignore[attr-defined]

    def teardown(self) -> None:
        torch.npu.empty_cache()  # type: ignore[attr-defined]

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        stats: dict[str, Any] = torch.npu.memory_stats(device)  # type: ignore[attr-defined]
        return stats

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """The numbers of the devices that `devices` counts or lists."""
        return list(devices) if isinstance(devices, list) else list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("npu", number) for number in devices]

    @staticmethod
    def auto_device_count() -> int:
        return int(torch.npu.device_count())  # type: ignore[attr-defined]

    @staticmethod
    def is_available() -> bool:
        return hasattr(torch, "npu") and bool(torch.npu.is_available())

    @staticmethod
    def name() -> str:
        return "npu"
