"""verl: an optimizer by its name, and its FSDP engines with the model attached, in a group of one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

if find_spec("verl") is None:
    pytest.skip("make test-integrations installs it", allow_module_level=True)

from tests.integrations import tiny_llama
from tests.models import Stack
from tiered_mem import TieringManager
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer

pytestmark = [
    pytest.mark.slow(why="trainings of a framework that takes seconds to import"),
    pytest.mark.filterwarnings("ignore"),  # verl's, on the engines and kernels that are not there
]

ROOT = Path(__file__).parents[2]
Outcome = tuple[list[float], list[torch.Tensor]]


@pytest.fixture(scope="module")
def plugin() -> None:
    """What pyproject.toml says is loaded, as verl does it."""
    import tomllib  # of Python 3.11

    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["verl.plugins"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_ENGINE_VENDOR", "tiered_mem")
        for name, value in points.items():
            sys.modules.pop(value, None)  # where the package is installed verl has loaded it without the variable
            EntryPoint(name, value, "verl.plugins").load()


@pytest.fixture
def group(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of one process."""
    from verl.models.transformers import monkey_patch

    # It looks for a class that TRL 1 does not have any more.
    monkeypatch.setattr(monkey_patch, "is_trl_available", lambda: False)
    backend = {"npu": "hccl", "cuda": "nccl"}.get(device, "gloo")
    distributed.init_process_group(backend, init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_build_optimizer_gives_a_tiered_one(device: str, default: TieringManager) -> None:
    from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer

    def train(**arguments: Any) -> tuple[torch.optim.Optimizer, Outcome]:
        torch.manual_seed(0)
        model = Stack(2, 16).to(device)
        optimizer = build_optimizer(model.parameters(), FSDPOptimizerConfig(lr=0.01, **arguments))
        losses = []
        for i in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(32, 16, generator=torch.Generator().manual_seed(i)).to(device))
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return optimizer, (losses, list(model.parameters()))

    for arguments in {}, {"optimizer": "SGD", "override_optimizer_config": {"momentum": 0.9}}:
        _, expected = train(**arguments)
        options = {**arguments.get("override_optimizer_config", {}), "residency": "host"}
        ours = {"optimizer_impl": "tiered_mem.optim", "override_optimizer_config": options}
        optimizer, outcome = train(**{**arguments, **ours})
        assert isinstance(optimizer, TieredOptimizer)
        assert outcome[0] == expected[0]
        assert all(map(torch.equal, outcome[1], expected[1]))


def engine(folder: Path, strategy: str, *, model: dict[str, Any] | None = None, **optimizer: Any) -> Any:
    """verl's engine of a Llama of four layers, the same each time."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    tiny_llama.model().save_pretrained(folder)
    off = {"load_tokenizer": False, "use_remove_padding": False, "enable_gradient_checkpointing": False}
    made = EngineRegistry.new(
        "language_model",
        strategy,
        model_config=HFModelConfig(path=str(folder), **off, **model or {}),
        engine_config=FSDPEngineConfig(
            strategy=strategy,
            use_torch_compile=False,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        ),
        optimizer_config=FSDPOptimizerConfig(lr=0.01, total_training_steps=8, lr_warmup_steps=0, **optimizer),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


def train(made: Any, device: str) -> Outcome:
    """Four steps. The engine goes to the host between two of them, and comes back."""
    losses = []
    for i in range(4):
        tokens = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(i)).to(device)
        with made.train_mode():
            made.optimizer_zero_grad()
            loss = made.module(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            made.optimizer_step()
            made.lr_scheduler_step()
        losses.append(float(loss))
        if i == 1:
            made.to("cpu", model=False, grad=False)
            made.to(device, model=False, grad=False)
    return losses, [value.cpu() for value in made.module.state_dict().values()]


@pytest.mark.usefixtures("plugin", "group")
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_an_engine_trains_as_verls(
    tmp_path: Path, device: str, default: TieringManager, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.workers.engine.fsdp import transformer_impl

    from tiered_mem.integrations.verl import AttachedEngine

    expected = train(engine(tmp_path, strategy), device)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "tiered_mem")
    monkeypatch.setattr(AttachedEngine, "min_bytes", 1)
    monkeypatch.setattr(transformer_impl, "offload_fsdp_optimizer", None)  # the states are where they are to go
    made = engine(tmp_path, strategy, optimizer_impl="tiered_mem.optim")
    assert isinstance(made, AttachedEngine)
    assert isinstance(made.optimizer, TieredOptimizer)
    before = int(default.stats()["offloaded.blocks.total"])
    losses, weights = train(made, device)
    assert losses == expected[0]
    assert all(map(torch.equal, weights, expected[1]))
    assert int(default.stats()["offloaded.blocks.total"]) > before


@pytest.mark.usefixtures("plugin", "group", "default")
def test_a_second_offloader_is_an_error_that_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "tiered_mem")
    with pytest.raises(ValueError, match="enable_activation_offload=True and VERL_ENGINE_VENDOR=tiered_mem would"):
        engine(tmp_path, "fsdp2", model={"enable_activation_offload": True})
