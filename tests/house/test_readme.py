"""README's first program, on a laptop."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

README = Path(__file__).parents[2] / "README.md"


class Model(nn.Module):
    """Its forward returns something that has a loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(4)))

    def forward(self, batch: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.layers(batch).pow(2).mean())


def names() -> dict[str, Any]:
    """What the program finds there."""
    model = Model()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "loader": torch.ones(5, 1024, 512)}


def test_the_first_program_trains_on_the_cpu_as_without_a_manager(caplog: pytest.LogCaptureFixture) -> None:
    program = README.read_text().split("```python\n")[1].split("```")[0]
    tiered, plain = names(), names()
    exec(program.replace("TieringManager(", 'TieringManager(device="cpu", host_bytes="64MiB", '), tiered)
    for batch in plain["loader"]:
        plain["model"](batch).loss.backward()
        plain["optimizer"].step()
        plain["optimizer"].zero_grad()
    assert tiered["manager"].stats()["released.bytes.total"] > 0
    for mine, other in zip(tiered["model"].parameters(), plain["model"].parameters(), strict=True):
        assert torch.equal(mine, other)
    assert "without the device_budget" in caplog.text
