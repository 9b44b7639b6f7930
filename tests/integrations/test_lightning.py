"""Lightning with the callback: bit-equal, alone, with accumulation and with clipping, and what is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="make test-integrations installs it")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from tests.integrations.peak import peak_of
from tests.models import Stack
from tiered_mem.integrations.lightning import NPUAccelerator, TieringCallback
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer
from tiered_mem.policies import LayerOrderPolicy

pytestmark = [
    pytest.mark.slow(why="trainings of a framework that takes seconds to import"),
    pytest.mark.filterwarnings("ignore"),  # Lightning's, on what this small data lacks
]

Outcome = tuple[list[float], dict[str, torch.Tensor]]


class Module(pl.LightningModule):
    """A small stack of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Stack(4)
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(
    folder: Path,
    device: str,
    *callbacks: pl.Callback,
    resume: Path | None = None,
    module: type[Module] = Module,
    **arguments: Any,
) -> tuple[Outcome, pl.Trainer]:
    """The losses and the weights after six steps, the same each time; and the trainer. resume: a checkpoint."""
    torch.manual_seed(0)
    model = module()
    data = torch.utils.data.DataLoader(torch.randn(24, 128, 64).unbind(), batch_size=4)
    trainer = pl.Trainer(
        accelerator=NPUAccelerator() if device.startswith("npu") else "auto",
        strategy=SingleDeviceStrategy(device=torch.device(device, 0)),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        callbacks=list(callbacks),
        **{"enable_checkpointing": False, **arguments},
    )
    trainer.fit(model, data, ckpt_path=None if resume is None else str(resume))
    return (model.losses, {name: value.cpu() for name, value in model.state_dict().items()}), trainer


def callback(**more: Any) -> TieringCallback:
    return TieringCallback(policy=LayerOrderPolicy(), host_bytes="64MiB", min_bytes=1, **more)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.01}],
    ids=["plain", "accumulation", "clipping"],
)
@pytest.mark.parametrize("optimizer", [None, "host"])
def test_losses_and_weights_are_those_of_the_plain_fit(
    tmp_path: Path, device: str, arguments: dict[str, Any], optimizer: Any
) -> None:
    seen: list[tuple[bool, int]] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *rest: Any) -> None:
            manager = tiering._manager
            assert manager is not None
            moved = int(manager.stats()["offloaded.blocks.total"])
            seen.append((isinstance(trainer.strategy.optimizers[0], TieredOptimizer), moved))

    ((losses, weights), _), plain = peak_of(lambda: fit(tmp_path, device, **arguments), device)
    tiering = callback(optimizer=optimizer)
    fitted, peak = peak_of(lambda: fit(tmp_path, device, tiering, Look(), **arguments), device)
    (others, tiered), trainer = fitted
    assert device == "cpu" or peak < plain
    assert losses == others
    assert all(torch.equal(value, tiered[name]) for name, value in weights.items())
    assert [each for each, _ in seen] == [optimizer is not None] * 6
    assert 0 < seen[0][1] < seen[-1][1]
    assert type(trainer.optimizers[0]) is torch.optim.AdamW
    assert trainer.optimizers[0].state


class Unlike(Module):
    """Its layers are in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.first, self.model.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        model: Any = self.model
        loss: torch.Tensor = model.second(model.first(batch).relu()).square().mean()
        self.losses.append(loss.item())
        return loss


@pytest.mark.parametrize("layers", [None, "model.first"])
def test_a_module_without_repeated_blocks(
    tmp_path: Path, device: str, layers: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Its activations stay, which is told, unless the callback is told of layers. The optimizer is tiered."""
    moved = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *rest: Any) -> None:
            manager = tiering._manager
            assert manager is not None
            moved.append(int(manager.stats()["offloaded.blocks.total"]))

    expected, _ = fit(tmp_path, device, module=Unlike)
    tiering = callback(optimizer="host", layers=layers)
    found, _ = fit(tmp_path, device, tiering, Look(), module=Unlike)
    assert found[0] == expected[0]
    assert all(torch.equal(value, found[1][name]) for name, value in expected[1].items())
    assert (moved[-1] > 0) == (layers is not None)
    assert ("the layers of Unlike are unknown" in caplog.text) == (layers is None)


def test_resume_in_all_directions(tmp_path: Path, device: str) -> None:
    """Lightning begins the epoch's data anew, and so goes on as a plain fit that was resumed does."""

    def tiering(tiered: bool) -> list[pl.Callback]:
        return [callback(optimizer="host")] if tiered else []

    expected: Outcome | None = None
    for first in (False, True):
        saving = ModelCheckpoint(tmp_path / str(first), filename="{step}", every_n_train_steps=3, save_top_k=-1)
        fit(tmp_path, device, *tiering(first), saving, enable_checkpointing=True)
        for second in (False, True):
            saved = tmp_path / str(first) / "step=3.ckpt"
            (losses, weights), _ = fit(tmp_path, device, *tiering(second), resume=saved)
            expected = expected or (losses, weights)
            assert len(losses) == 3
            assert losses == expected[0]
            assert all(torch.equal(value, expected[1][name]) for name, value in weights.items())


def test_an_error_leaves_the_optimizer_as_it_was(tmp_path: Path, device: str) -> None:
    trainers: list[pl.Trainer] = []

    class Fail(pl.Callback):
        def on_train_batch_end(
            self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, index: int
        ) -> None:
            trainers.append(trainer)
            if index == 2:
                raise RuntimeError("a power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        fit(tmp_path, device, callback(optimizer="host"), Fail())
    optimizer = trainers[0].optimizers[0]
    assert type(optimizer) is torch.optim.AdamW
    assert all(state["exp_avg"].numel() for state in optimizer.state.values())
    assert optimizer.state
