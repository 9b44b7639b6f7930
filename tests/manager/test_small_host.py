"""A host that cannot hold all that has to leave: layers are computed again for what finds no room there."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
import torch

from benchmarks.peak import Peak
from examples.gpt import GPT
from tiered_mem import TieringManager

STEPS = 16


class Counting(torch.nn.Module):
    """Counts its calls in a buffer, and so is never computed again."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = self.layer(x)
        return result


def training(device: str, *, counting: int = 0) -> tuple[GPT, torch.Tensor, torch.optim.Optimizer]:
    """counting: so many of the eight layers."""
    torch.manual_seed(0)
    model = GPT(layers=8, width=64, heads=2, context=128)
    for number in range(counting):
        model.layers[number] = Counting(model.layers[number])
    model.to(device)
    tokens = torch.randint(0, 255, (8, 128)).to(device)
    return model, tokens, torch.optim.SGD(model.parameters(), lr=0.1)


def train(
    model: GPT, tokens: torch.Tensor, optimizer: torch.optim.Optimizer, device_module: ModuleType
) -> tuple[list[float], list[int]]:
    """The loss and the peak of each step."""
    losses, peaks = [], []
    for _ in range(STEPS):
        device_module.synchronize()
        most = Peak(device_module)
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        peaks.append(most.read())
        del loss
    return losses, peaks


def tiered(
    device: str, device_module: ModuleType, share: float, of_lacking: float, *, counting: int = 0
) -> tuple[TieringManager, list[int], int, int]:
    """Trains within so much of the memory that the plain step adds, and a host for so much of what has to leave.

    The manager, the peaks, the budget, and the plain steps' peak.
    """
    model, tokens, optimizer = training(device, counting=counting)
    before = device_module.memory_allocated()
    losses, plain = train(model, tokens, optimizer, device_module)
    expected = [parameter.detach().cpu() for parameter in model.parameters()]
    del model, tokens, optimizer
    model, tokens, optimizer = training(device, counting=counting)
    most = max(plain) - before + device_module.memory_allocated()
    budget = int(before + share * (max(plain) - before))
    host = int(of_lacking * (max(plain) - budget))
    with (
        TieringManager(policy="auto", device_budget=budget, device=device, host_bytes=host) as manager,
        manager.attach(model, min_bytes=4096),
    ):
        again, peaks = train(model, tokens, optimizer, device_module)
    assert again == losses
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(model.parameters(), expected, strict=True))
    return manager, peaks, budget, most


@pytest.mark.parametrize("of_lacking", [0.1, 0.5, 0.9])
def test_layers_are_computed_again_in_place_of_what_finds_no_room(
    of_lacking: float, device: str, device_module: ModuleType
) -> None:
    manager, peaks, budget, plain = tiered(device, device_module, 0.5, of_lacking)
    assert max(peaks[-4:]) <= budget
    assert max(peaks) <= plain, "no trial takes what the plain step does not"
    report = manager.report()
    assert any(each.how == "full" for each in report.treatments)


def test_where_too_few_layers_can_be_computed_again_the_report_says_what_is_missing(
    device: str, device_module: ModuleType
) -> None:
    manager, peaks, budget, plain = tiered(device, device_module, 0.3, 0.1, counting=6)
    assert budget < max(peaks[-4:]) < 0.95 * max(peaks) <= plain, "what can be still is"
    report = manager.report()
    assert not report.trying, "as many were treated in a step that was tried as in those that follow"
    why = "the step does not fit, and would lack more else"
    assert [each.why for each in report.treatments if each.how] == [why]
    told = re.search(r"([\d.]+) MiB more of host_bytes, or a spill_dir", str(report))
    assert told is not None, str(report)
    # The host is not quite as full at the peak as it is at its fullest.
    assert float(told[1]) == pytest.approx((max(peaks[-4:]) - budget) / 2**20, abs=0.15)
