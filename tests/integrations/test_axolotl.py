"""axolotl's plugin, by its plugin manager and in its configuration, with the Trainer that is below axolotl's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("axolotl") is None:
    pytest.skip("make test-integrations installs it", allow_module_level=True)

from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.integrations import tiny_llama

pytestmark = [
    pytest.mark.slow(why="trainings of a framework that takes seconds to import"),
    pytest.mark.filterwarnings("ignore"),  # axolotl's, in this transformers
]

PLUGIN = "tiered_mem.integrations.axolotl.TieringPlugin"


@pytest.fixture(scope="module")
def plugins() -> Any:
    """axolotl's manager of plugins, with ours."""
    from axolotl.integrations.base import PluginManager

    manager = PluginManager.get_instance()
    manager.register(PLUGIN)
    return manager


def read(**arguments: Any) -> Any:
    """A configuration, as axolotl reads it."""
    from axolotl.integrations.config import merge_input_args
    from axolotl.utils.dict import DictDefault

    _, kind = merge_input_args()
    said = {"base_model": "llama", "datasets": [{"path": "rows", "type": "alpaca"}], "plugins": [PLUGIN]}
    training = {"learning_rate": 0.01, "micro_batch_size": 2, "gradient_accumulation_steps": 1}
    return DictDefault(kind(**said, **training, **arguments).model_dump(exclude_none=True))


def train(folder: Path, callbacks: list[TrainerCallback]) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    rows = torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        model=tiny_llama.model(),
        args=TrainingArguments(
            str(folder),
            max_steps=3,
            per_device_train_batch_size=2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            optim="adamw_torch",
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=callbacks,
    )
    trainer.train()
    return trainer.state.log_history, [value.cpu() for value in trainer.model.parameters()]


def test_what_the_configuration_says_tiers_the_trainer(tmp_path: Path, plugins: Any) -> None:
    ours = {"optimizer": "host", "host_bytes": "64MiB", "policy": "layer-order", "min_bytes": 1}
    callbacks = plugins.add_callbacks_post_trainer(read(tiered_mem=ours), None)
    expected, weights = train(tmp_path, [])
    logged, others = train(tmp_path, callbacks)
    assert [each["loss"] for each in logged[:3]] == [each["loss"] for each in expected[:3]]
    assert all(map(torch.equal, others, weights))
    assert logged[0]["tiered/offloaded_gib"] > 0


def test_the_optimizer_is_on_the_host_unless_said_otherwise(plugins: Any) -> None:
    assert read().tiered_mem == {"optimizer": "host"}


def test_axolotls_own_offloading_is_an_error_that_names_both(plugins: Any) -> None:
    config = read(activation_offloading="disk", gradient_checkpointing=True)
    with pytest.raises(ValueError, match="activation_offloading: disk and TieringPlugin would both move"):
        plugins.add_callbacks_post_trainer(config, None)
