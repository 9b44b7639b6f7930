"""TRL's SFTTrainer with transformers' callback: bit-equal to plain, and not beside TRL's own offloading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="make test-integrations installs it")

import datasets.arrow_dataset
from datasets import Dataset
from transformers import set_seed
from trl import SFTConfig, SFTTrainer

from tests.integrations.tiny_llama import model, tokenizer
from tiered_mem.integrations.transformers import TieringCallback
from tiered_mem.policies import LayerOrderPolicy

pytestmark = [
    pytest.mark.slow(why="trainings of a framework that takes seconds to import"),
    pytest.mark.filterwarnings("ignore"),  # TRL's and datasets', in this torch
]

STEPS = 4


@pytest.fixture(autouse=True)
def hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """datasets makes its fingerprints with dill, which cannot pickle the pyarrow that is there."""
    monkeypatch.setattr(datasets.arrow_dataset, "generate_fingerprint", lambda dataset: "the same")


def trainer(folder: Path, *callbacks: TieringCallback, **arguments: Any) -> SFTTrainer:
    """One of a Llama of four layers and sixteen rows, the same each time."""
    set_seed(0)
    rows = torch.randint(2, 64, (16, 32), generator=torch.Generator().manual_seed(1)).tolist()
    return SFTTrainer(
        model=model(),
        args=SFTConfig(
            str(folder),
            max_steps=STEPS,
            per_device_train_batch_size=4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True},
            **{"optim": "adamw_torch", "bf16": False, **arguments},
        ),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
    )


def callback() -> TieringCallback:
    return TieringCallback(optimizer="host", policy=LayerOrderPolicy(), host_bytes="256MiB", min_bytes=1)


def outcome(trained: SFTTrainer) -> tuple[list[float], dict[str, torch.Tensor]]:
    trained.train()
    losses = [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    return losses, {name: value.cpu() for name, value in trained.model.state_dict().items()}


@pytest.mark.parametrize("checkpointing", [True, False])
def test_losses_and_weights_are_those_of_the_plain_run(tmp_path: Path, checkpointing: bool) -> None:
    plain = trainer(tmp_path, activation_checkpointing=checkpointing)
    expected, weights = outcome(plain)
    tiered = trainer(tmp_path, callback(), activation_checkpointing=checkpointing)
    losses, others = outcome(tiered)
    assert losses == expected
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    assert tiered.state.log_history[0]["tiered/offloaded_gib"] > 0


def test_trls_own_offloading_is_an_error_that_names_both(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="activation_offloading=True and TieringCallback would both move"):
        trainer(tmp_path, callback(), activation_offloading=True).train()
