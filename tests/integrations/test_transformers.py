"""Hugging Face's Trainer with the callback, and with `enable`: bit-equal, in less memory, and what goes wrong."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="the Trainer needs accelerate, which make test-integrations installs")

from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.optimization import Adafactor, AdafactorSchedule

from tests.integrations import tiny_llama
from tests.integrations.peak import peak_of
from tiered_mem.integrations.transformers import TieringCallback, enable
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer
from tiered_mem.policies import LayerOrderPolicy

pytestmark = [
    pytest.mark.slow(why="trainings of a framework that takes seconds to import"),
    # accelerate and transformers, in this torch.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

STEPS = 4
OPTIONS: dict[str, Any] = {"host_bytes": "256MiB", "min_bytes": 1}


class Batches(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sixteen rows of 32 tokens, the same each time."""

    def __init__(self) -> None:
        self._rows = torch.randint(0, 64, (16, 32), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def trainer(folder: Path, *callbacks: TrainerCallback, **arguments: Any) -> Trainer:
    """One of a Llama of four layers, the same each time."""
    set_seed(0)
    arguments = {"optim": "adamw_torch", "max_steps": STEPS, "save_strategy": "no", **arguments}
    return Trainer(
        model=tiny_llama.model(use_cache=False),
        args=TrainingArguments(
            str(folder),
            per_device_train_batch_size=4,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            seed=0,
            **arguments,
        ),
        train_dataset=Batches(),
        eval_dataset=Batches(),
        callbacks=list(callbacks),
    )


Outcome = tuple[list[float], dict[str, torch.Tensor]]


def outcome(trained: Trainer, **arguments: Any) -> Outcome:
    """The losses and the weights after training."""
    trained.train(**arguments)
    losses = [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
    assert len(losses) == STEPS or arguments
    assert all(map(math.isfinite, losses))
    return losses, {name: value.cpu() for name, value in trained.model.state_dict().items()}


def assert_same(some: Outcome, others: Outcome) -> None:
    assert some[0] == others[0]
    assert all(torch.equal(value, others[1][name]) for name, value in some[1].items())


def callback(**more: Any) -> TieringCallback:
    return TieringCallback(policy=LayerOrderPolicy(), **{**OPTIONS, **more})


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
    },
    "reentrant": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "adafactor": {"optim": "adafactor"},
    "fused": {"optim": "adamw_torch_fused"},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
}


@pytest.mark.parametrize("arguments", SETTINGS.values(), ids=SETTINGS)
def test_losses_and_weights_are_those_of_the_plain_run(tmp_path: Path, arguments: dict[str, Any]) -> None:
    expected = outcome(trainer(tmp_path, **arguments))
    tiered = trainer(tmp_path, callback(optimizer="host"), **arguments)
    assert_same(outcome(tiered), expected)
    assert tiered.state.log_history[0]["tiered/offloaded_gib"] > 0


@pytest.mark.parametrize("overlap", ["forward", "auto"])
@pytest.mark.parametrize("arguments", SETTINGS.values(), ids=SETTINGS)
def test_an_overlap_changes_no_number(tmp_path: Path, arguments: dict[str, Any], overlap: str) -> None:
    """The Trainer clips, so that "auto" is "forward" in the end."""
    if arguments.get("optim") == "adafactor" and overlap == "forward":
        pytest.skip("transformers' Adafactor is stepped at once")
    expected = outcome(trainer(tmp_path, **arguments))
    assert_same(outcome(trainer(tmp_path, callback(optimizer="host", overlap=overlap), **arguments)), expected)
    if arguments.get("optim") != "adafactor":
        enabled = trainer(tmp_path, **arguments)
        enable(enabled, optimizer="host", overlap=overlap, **OPTIONS)
        assert_same(outcome(enabled), expected)


def test_the_trainer_looks_at_gradients_after_backward(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"overlap=.forward"):
        trainer(tmp_path, callback(optimizer="host", overlap="backward")).train()


def test_with_gradient_checkpointing_one_line_says_what_to_switch_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = LayerOrderPolicy(4, recompute="cheap")
    outcome(trainer(tmp_path, TieringCallback(policy=policy, **OPTIONS), gradient_checkpointing=True))
    told = [each.message for each in caplog.records if "checkpoint" in each.message]
    assert len(told) == 1
    assert told[0].startswith(
        "LlamaDecoderLayer is not computed again in backward, and keeps what it saves: it has a"
    )
    assert "gradient_checkpointing=False" in told[0]


def test_the_optimizer_is_tiered_while_it_trains_and_plain_afterwards(tmp_path: Path) -> None:
    """With fp16 too, where accelerate keeps a method of the optimizer that it was given."""
    seen: list[bool] = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer = kwargs["optimizer"].optimizer
            seen.append(isinstance(optimizer, TieredOptimizer) and not optimizer.states.here)

    plain = trainer(tmp_path, fp16=True)
    plain.train()
    tiered = trainer(tmp_path, callback(optimizer="host"), Look(), fp16=True)
    tiered.train()
    assert seen == [True] * STEPS
    assert type(tiered.optimizer.optimizer) is torch.optim.AdamW
    assert_equal_states(tiered.optimizer.state_dict(), plain.optimizer.state_dict())


def assert_equal_states(some: dict[str, Any], others: dict[str, Any]) -> None:
    assert some["state"].keys() == others["state"].keys()
    for name, state in some["state"].items():
        assert all(torch.equal(value.cpu(), others["state"][name][key].cpu()) for key, value in state.items())


def test_the_peak_is_lower(tmp_path: Path, device: str) -> None:
    def peak(*callbacks: TrainerCallback) -> int:
        made = trainer(tmp_path, *callbacks)
        return peak_of(made.train, device)[1]

    plain, activations, both = peak(), peak(callback()), peak(callback(optimizer="host", min_bytes=1))
    assert both < activations < plain or device == "cpu"


@pytest.mark.parametrize("second", ["plain", "tiered", "enabled"])
@pytest.mark.parametrize("first", ["plain", "tiered", "enabled"])
def test_resume_in_all_directions(tmp_path: Path, first: str, second: str) -> None:
    def made(kind: str) -> Trainer:
        callbacks = [callback(optimizer="host")] if kind == "tiered" else []
        result = trainer(tmp_path, *callbacks, save_strategy="steps", save_steps=2)
        if kind == "enabled":
            enable(result, optimizer="host", policy=LayerOrderPolicy(), **OPTIONS)
        return result

    expected = outcome(made("plain"))
    assert_same(outcome(made(first)), expected)
    resumed = outcome(made(second), resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(resumed, expected)


@pytest.mark.parametrize("how", ["callback", "enable"])
def test_schedule_free_trains_and_is_evaluated_and_saved_at_its_average(tmp_path: Path, how: str) -> None:
    """The Trainer switches it, by methods that torch's optimizers do not have."""
    pytest.importorskip("schedulefree", reason="make test-integrations installs it")
    arguments = {
        "optim": "schedule_free_adamw",
        "lr_scheduler_type": "constant",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }

    def run(folder: Path, *callbacks: TrainerCallback) -> tuple[Outcome, list[float]]:
        made = trainer(folder, *callbacks, **arguments)
        if how == "enable" and folder.name == "tiered":
            enable(made, optimizer="host", policy=LayerOrderPolicy(), **OPTIONS)
        result = outcome(made)
        return result, [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]

    expected, evaluated = run(tmp_path / "plain")
    found, tiered = run(tmp_path / "tiered", *([callback(optimizer="host")] if how == "callback" else []))
    assert_same(found, expected)
    assert tiered == evaluated
    saved = [tmp_path / name / "checkpoint-2" / "model.safetensors" for name in ("plain", "tiered")]
    assert saved[0].read_bytes() == saved[1].read_bytes()


def test_a_scheduler_that_reads_the_state_of_its_optimizer(tmp_path: Path) -> None:
    def run(*callbacks: TrainerCallback) -> tuple[Outcome, list[float]]:
        made = trainer(tmp_path, *callbacks)
        made.optimizer = Adafactor(made.model.parameters(), warmup_init=True)
        made.lr_scheduler = AdafactorSchedule(made.optimizer)
        result = outcome(made)
        return result, [float(entry["learning_rate"]) for entry in made.state.log_history if "loss" in entry]

    expected, rates = run()
    found, tiered = run(callback(optimizer="host"))
    assert_same(found, expected)
    assert tiered == rates


class Unlike(torch.nn.Module):
    """Two layers that are not alike, in no list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(32, 64)
        self.second = torch.nn.Linear(64, 1)

    def forward(self, input_ids: torch.Tensor, **rest: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.second(self.first(input_ids.float() / 64).relu()).square().mean()}


@pytest.mark.parametrize("layers", [None, "first", "modules"])
def test_a_model_without_repeated_blocks(
    tmp_path: Path, layers: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Its activations stay, which is told, unless the callback is told of layers. The optimizer is tiered."""

    def run(*callbacks: TrainerCallback, model: torch.nn.Module) -> tuple[Outcome, Trainer]:
        made = trainer(tmp_path, *callbacks)
        made.model = made.model_wrapped = model.to(made.args.device)
        return outcome(made), made

    expected, _ = run(model=Unlike())
    model = Unlike()
    named: Any = [model.first, model.second] if layers == "modules" else layers
    found, made = run(callback(optimizer="host", layers=named), model=model)
    assert_same(found, expected)
    assert (made.state.log_history[-2]["tiered/offloaded_gib"] > 0) == (layers is not None)
    assert made.state.log_history[-2]["tiered/host_peak_gib"] > 0
    said = [each.message for each in caplog.records if "activations stay" in each.message]
    assert len(said) == (layers is None)
    assert all("the layers of Unlike are unknown" in each and "TieringCallback(layers=" in each for each in said)


def test_layers_that_the_model_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layers='model\.blocks' is no module of LlamaForCausalLM"):
        trainer(tmp_path, callback(layers="model.blocks")).train()


def test_enable_tells_all_that_report(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            told.append(dict(logs))

    made = trainer(tmp_path, Reporter())
    enable(made, optimizer="host", policy=LayerOrderPolicy(), **OPTIONS)
    assert_same(outcome(made), outcome(trainer(tmp_path)))
    assert {"tiered/offloaded_gib", "tiered/host_peak_gib", "tiered/late_reloads"} <= told[0].keys()


def test_training_twice_and_after_an_error(tmp_path: Path) -> None:
    class Fail(TrainerCallback):
        fails = True

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.fails:
                raise RuntimeError("a power cut")

    def thrice(*callbacks: TrainerCallback) -> Outcome:
        fail = Fail()
        made = trainer(tmp_path, *callbacks, fail)
        with pytest.raises(RuntimeError, match="power cut"):
            made.train()
        fail.fails = False
        made.train()
        return outcome(made)

    assert_same(thrice(callback(optimizer="host")), thrice())


@pytest.mark.parametrize(
    "arguments",
    [{"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}}],
    ids=["checkpointing"],
)
def test_a_second_offloader_is_an_error_that_names_both(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"offload.*and TieringCallback would both move"):
        trainer(tmp_path, callback(), **arguments).train()


@pytest.mark.parametrize("residency", [None, "host"])
def test_what_deepspeed_offloads_is_left_to_it(tmp_path: Path, residency: Any) -> None:
    """Activations are no concern of its offload of the optimizer."""
    made = trainer(tmp_path, callback(optimizer=residency))
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    made.args.deepspeed_plugin = SimpleNamespace(hf_ds_config=config)
    if residency is None:
        made.train()
        return
    with pytest.raises(
        ValueError, match=r"offload_optimizer\.device='cpu' and TieringCallback\(optimizer='host'\)"
    ):
        made.train()


def test_the_fused_optimizer_of_npu_guides_is_refused_with_another(tmp_path: Path, device: str) -> None:
    if device != "npu":
        pytest.skip("it is torch_npu's")
    with pytest.raises(ValueError, match=r'NpuFusedAdamW lays .*\(in transformers optim="adamw_torch_fused"'):
        trainer(tmp_path, callback(optimizer="host"), optim="adamw_torch_npu_fused").train()


def test_mistakes_show_when_they_are_made(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="host_byte"):
        TieringCallback(host_byte="1GiB")
    made = trainer(tmp_path)
    made.create_optimizer()
    with pytest.raises(RuntimeError, match="before train"):
        enable(made, optimizer="host")
