"""xtuner v1's configuration of an optimizer: bit-equal to its AdamWConfig."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

pytest.importorskip("xtuner.v1", reason="xtuner v1 is not installed: clone it, and put it on PYTHONPATH")

from xtuner.v1.config.optim import AdamWConfig

from tests.models import Stack
from tiered_mem import TieringManager
from tiered_mem.integrations.xtuner import TieredAdamWConfig
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer

pytestmark = [
    pytest.mark.slow(why="a framework that takes seconds to import"),
    pytest.mark.filterwarnings("ignore"),  # torch_npu's, on what it replaces for xtuner
]


class Model(Stack):
    """With what xtuner's models have."""

    def trainable_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self.named_parameters())


def test_losses_and_weights_are_xtuners(tmp_path: Path, device: str, default: TieringManager) -> None:
    def train(config: Any) -> tuple[Any, list[float], Model]:
        torch.manual_seed(0)
        model = Model(2, 16).to(device)
        optimizer = config.build(model)
        losses = []
        for i in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(32, 16, generator=torch.Generator().manual_seed(i)).to(device))
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return optimizer, losses, model

    options = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9), "foreach": False}
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        _, expected, plain = train(AdamWConfig(**options))
        config = TieredAdamWConfig(**options)
        optimizer, losses, tiered = train(config)
    finally:
        distributed.destroy_process_group()
    assert config.swap_optimizer  # by which xtuner sees that it is not to move the states
    assert isinstance(optimizer, TieredOptimizer)
    assert losses == expected
    assert all(map(torch.equal, plain.parameters(), tiered.parameters()))
