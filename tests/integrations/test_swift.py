"""ms-swift, from its arguments on: our entries in both its maps, and bit-equal to plain."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("swift") is None:
    pytest.skip("make test-integrations installs ms-swift", allow_module_level=True)

from tests.integrations.tiny_llama import write_messages, write_model

pytestmark = [
    pytest.mark.slow(why="trainings of a framework that takes seconds to import"),
    pytest.mark.filterwarnings("ignore"),  # ms-swift's, on versions that are newer than it knows
]

STEPS = 3
# Of so many words an attention saves tensors of more than a MiB.
WORDS = 256


def train(folder: Path, **arguments: Any) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """What was logged, and the weights."""
    from swift.arguments import SftArguments
    from swift.pipelines.train.sft import SwiftSft

    (folder / "plugin").mkdir(exist_ok=True)
    plugin = folder / "plugin/tiering.py"
    plugin.write_text("import tiered_mem.integrations.swift\n")
    pipeline = SwiftSft(
        SftArguments(
            model=str(write_model(folder / "model")),
            model_type="llama",
            template="dummy",
            dataset=[str(write_messages(folder / "rows.jsonl", 6, WORDS))],
            output_dir=str(folder / "output"),
            external_plugins=[str(plugin)],
            tuner_type="full",
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=1,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            optim="adamw_torch",
            learning_rate=0.01,
            torch_dtype="float32",
            fp16=False,
            bf16=False,
            attn_impl="eager",
            check_model=False,
            load_from_cache_file=False,
            split_dataset_ratio=0,
            dataloader_num_workers=0,
            seed=0,
            **arguments,
        )
    )
    logged = pipeline.main()["log_history"]
    return logged, {name: value.cpu() for name, value in pipeline.model.state_dict().items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(tmp_path_factory.mktemp("plain"))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERED_MEM_HOST_BYTES", "256MiB")
    monkeypatch.setenv("TIERED_MEM_POLICY", "layer-order")


@pytest.mark.parametrize("arguments", [{}, {"optimizer": "tiered_mem"}], ids=["activations", "both"])
def test_losses_and_weights_are_those_of_the_plain_run(
    tmp_path: Path, plain: Any, arguments: dict[str, Any]
) -> None:
    logged, weights = train(tmp_path, callbacks=["tiered_mem"], **arguments)
    losses, expected = ([each["loss"] for each in log if "loss" in each] for log in (logged, plain[0]))
    assert losses == expected
    assert len(losses) == STEPS
    assert all(torch.equal(value, weights[name]) for name, value in plain[1].items())
    assert logged[0]["tiered/offloaded_gib"] > 0


def test_the_optimizer_asks_for_the_callback(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="add --callbacks tiered_mem"):
        train(tmp_path, optimizer="tiered_mem")
