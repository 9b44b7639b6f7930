"""A step above the budget is told once for each cause, and small tensors move where they fill the device."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn

from tiered_mem import TieringManager

ROWS, WIDTH = 250, 128  # tensors of 125 KiB


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(torch.sin(x)))


def train(device: str, device_module: ModuleType, manager: TieringManager | None, **attached: object) -> list[int]:
    """The peak of each of six steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(24))).to(device)
    x = torch.randn(ROWS, WIDTH).to(device)
    if manager is not None:
        manager.attach(model, **attached)  # type: ignore[arg-type]
    peaks = []
    for _ in range(6):
        device_module.reset_peak_memory_stats()
        model(x).sum().backward()
        model.zero_grad()
        peaks.append(device_module.max_memory_allocated())
    return peaks


def part_of_the_peak(share: float, device: str, device_module: ModuleType) -> int:
    """What is there already, and a share of what the plain run takes on top."""
    floor = device_module.memory_allocated()
    return int(floor + share * (max(train(device, device_module, None)) - floor))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_min_bytes_falls_where_small_tensors_fill_the_device(
    device: str, device_module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    budget = part_of_the_peak(0.6, device, device_module)
    with TieringManager(device_budget=budget, device=device, host_bytes="32MiB") as manager:
        peaks = train(device, device_module, manager)
        assert not manager.report().missing
    assert max(peaks) <= budget
    assert said(caplog) == []


def test_a_budget_that_small_tensors_break_is_told_once_with_numbers(
    device: str, device_module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    budget = part_of_the_peak(0.6, device, device_module)
    with TieringManager(device_budget=budget, device=device, host_bytes="32MiB") as manager:
        peaks = train(device, device_module, manager, min_bytes="1MiB")
        report = manager.report()
    assert min(peaks) > budget
    (told,) = said(caplog)
    assert "nothing that it saved for backward could move" in told
    assert "in tensors below min_bytes" in told
    assert report.missing
    assert report.measured_peak == max(peaks[-5:-1])
    assert report.budget == budget


def test_what_comes_after_the_backward_is_told_as_that(
    device: str, device_module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    budget = part_of_the_peak(1.5, device, device_module)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(24))).to(device)
    x = torch.randn(ROWS, WIDTH).to(device)
    with (
        TieringManager(device_budget=budget, device=device, host_bytes="32MiB") as manager,
        manager.attach(model, min_bytes=4096),
    ):
        device_module.reset_peak_memory_stats()  # to measure the link has taken more
        for step in range(5):
            model(x).sum().backward()
            if step >= 2:
                torch.empty(budget, dtype=torch.uint8, device=device)
    (told,) = said(caplog)
    assert "after the last use of what was saved, as a rule in the optimizer's step or an evaluation" in told
