"""torchtitan's two overrides, by its own modules: bit-equal to its own optimizers and checkpointing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan", reason="make test-integrations installs it")

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC

from tests.models import Stack
from tiered_mem import TieringManager
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer

pytestmark = [
    pytest.mark.slow(why="trainings of a framework that takes seconds to import"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

OURS = "tiered_mem.integrations.torchtitan"
OPTIMIZER, ACTIVATIONS = f"{OURS}.optimizer", f"{OURS}.activations"


class Job(Configurable):
    """As much of torchtitan's trainer as has to do with optimizers and activations."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        optimizer: OptimizersContainer.Config
        activation_checkpoint: ActivationCheckpointing.Config | None
        override: OverrideConfig = field(default_factory=OverrideConfig)

    def __init__(self, config: Config, *, device: str) -> None:
        apply_overrides(config.override, config)
        torch.manual_seed(0)
        self.model = Stack(4, 16)
        if config.activation_checkpoint is not None:
            config.activation_checkpoint.build(dump_folder="").apply(self.model)
        self.model.to(device)
        self.optimizers = config.optimizer.build(model_parts=[self.model])
        self._device = device

    def step(self, number: int) -> float:
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(number)).to(self._device)
        loss = self.model(x.requires_grad_())
        loss.backward()
        self.optimizers.step()
        self.optimizers.zero_grad()
        return float(loss)


def job(device: str, *imports: Any, checkpointing: Any = None, implementation: str = "for-loop") -> Job:
    groups = [
        ParamGroupConfig(pattern=r"norm", optimizer_name="Adam", optimizer_kwargs={"lr": 0.02}),
        ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01}),
    ]
    config = Job.Config(
        optimizer=OptimizersContainer.Config(param_groups=groups, implementation=implementation),
        activation_checkpoint=checkpointing,
        override=OverrideConfig(imports=list(imports)),
    )
    return Job(config, device=device)


def assert_same(some: Job, others: Job) -> None:
    assert all(map(torch.equal, some.model.parameters(), others.model.parameters()))


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("checkpointing", [None, FullAC, SelectiveAC])
def test_losses_and_weights_are_torchtitans(
    device: str, default: TieringManager, checkpointing: Any, implementation: str
) -> None:
    made = checkpointing and checkpointing.Config()
    plain = job(device, checkpointing=made, implementation=implementation)
    expected = [plain.step(i) for i in range(4)]
    attach = {"attach": checkpointing is None, "min_bytes": 1}
    imports = [(OPTIMIZER, attach), *([(ACTIVATIONS, {"min_bytes": 1})] if checkpointing else [])]
    tiered = job(device, *imports, checkpointing=made, implementation=implementation)
    assert all(isinstance(each, TieredOptimizer) for each in tiered.optimizers)
    before = int(default.stats()["offloaded.blocks.total"])
    assert [tiered.step(i) for i in range(4)] == expected
    assert int(default.stats()["offloaded.blocks.total"]) > before
    assert_same(tiered, plain)


def test_a_checkpoint_goes_both_ways(device: str, default: TieringManager) -> None:
    for first, second in ((), (OPTIMIZER,)), ((OPTIMIZER,), ()):
        began, resumed = job(device, *first), job(device, *second)
        for i in range(3):
            began.step(i)
        resumed.model.load_state_dict(began.model.state_dict())
        resumed.optimizers.load_state_dict(began.optimizers.state_dict())
        assert [resumed.step(i) for i in range(3, 6)] == [began.step(i) for i in range(3, 6)]
        assert_same(resumed, began)


def test_the_host_keeps_parameters_or_states_and_not_both(device: str, default: TieringManager) -> None:
    with pytest.raises(ValueError, match=r"enable_cpu_offload and .*torchtitan.optimizer would both"):
        job("cpu", OPTIMIZER)


def test_states_that_a_hook_makes_are_refused(device: str, default: TieringManager) -> None:
    with pytest.raises(ValueError, match=r"write --optimizer.implementation fused"):
        job(device, OPTIMIZER, implementation="fused_opt_states_bf16")
