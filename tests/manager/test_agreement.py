"""When a rank tells the others that its budget is too small, and when all of them end with it.

The ranks are managers of this process. tests/distributed has ranks that wait for each other's messages.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

from tiered_mem import BudgetTooSmall, TieringManager, agreement

ENOUGH = 64 << 20
WEIGHTS = 8 * 2 * (128 * 128 + 128) * 4  # bytes of a rank's model


class Rank:
    """A manager, and a model that it is attached to."""

    def __init__(self, device: str, module: ModuleType, budget: int, **arguments: Any) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128)) for _ in range(8)
        ).to(device)
        self.x = torch.randn(64, 128, device=device)
        if not arguments:
            arguments = {"device_budget": module.memory_allocated() + budget}
        self.manager = TieringManager(device=device, host_bytes="8MiB", **arguments)
        self.context = self.manager.offload_context(self.layers, min_bytes=4096)

    def forward(self) -> torch.Tensor:
        x = self.x
        with self.context:
            for layer in self.layers:
                x = layer(x)
        return x.pow(2).mean()


@pytest.fixture
def ranks(
    device: str, device_module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., Rank]]:
    """Makes ranks of a job of its own."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", str(tmp_path))
    with ExitStack() as opened:

        def make(budget: int = ENOUGH, **arguments: Any) -> Rank:
            rank = Rank(device, device_module, budget, **arguments)
            opened.callback(rank.manager.close)
            return rank

        yield make
    gc.collect()


def optimizers(*ranks: Rank) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(rank.layers.parameters()) for rank in ranks]


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def test_all_end_with_the_same_sentence_after_the_first_optimizer_step(
    ranks: Callable[..., Rank], caplog: pytest.LogCaptureFixture
) -> None:
    """The states of the second rank's optimizer are too many."""
    one, other = ranks(), ranks(WEIGHTS)
    with caplog.at_level(logging.WARNING, "tiered_mem"):
        for rank in (one, other):
            rank.forward().backward()
        for optimizer in optimizers(one, other):
            step(optimizer)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "the least that this step can be run in. In what follows the backward" in caplog.text
    said = []
    for rank in (one, other):
        with pytest.raises(BudgetTooSmall, match="all ranks of this machine end here") as caught:
            rank.forward()
        said.append(str(caught.value))
        assert caught.value.floor - caught.value.budget > WEIGHTS
    assert said[0] == said[1]
    # It has been said. Who goes on hears of its own budget alone.
    one.forward().backward()
    with pytest.raises(BudgetTooSmall, match="is below"):
        other.forward()


def test_budgets_that_are_enough_change_nothing(
    ranks: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [ranks(), ranks()]
    steps = optimizers(*made)
    for number in range(3):
        for rank in made:
            rank.forward().backward()
        for optimizer in steps:
            step(optimizer)
        if number == 1:
            # There is one wait in a whole run.
            monkeypatch.delattr("tiered_mem.tiers.node_verdicts.NodeVerdicts.wait")
    assert not [hook for hook in hooks.values() if hook.__module__ == agreement.__name__]


def test_a_rank_that_is_through_a_step_goes_on_until_its_optimizer_steps(ranks: Callable[..., Rank]) -> None:
    """As the last one of a pipeline does, for which each micro-batch is a step. The others need its gradients."""
    one, last = ranks(), ranks(WEIGHTS // 2)
    for _ in range(4):
        last.forward().backward()
    one.forward().backward()
    for optimizer in optimizers(one, last):
        step(optimizer)
    for rank in (last, one):
        with pytest.raises(BudgetTooSmall, match="all ranks of this machine"):
            rank.forward()


def test_ranks_without_a_budget_take_no_part(ranks: Callable[..., Rank]) -> None:
    without = [ranks(policy="layer-order"), ranks(policy="lru")]
    small, idle = ranks(WEIGHTS), ranks()
    for rank in (*without, small):
        rank.forward().backward()
    for optimizer in optimizers(*without, small):
        step(optimizer)
    for rank in (*without, idle):  # which makes its first forward
        rank.forward().backward()
    with pytest.raises(BudgetTooSmall, match="all ranks of this machine"):
        small.forward()


def test_who_says_nothing_is_waited_for_once_and_told_of(
    ranks: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank whose optimizer is in another process, as where it hangs."""
    monkeypatch.setattr(agreement, "_PATIENCE_S", 0.01)
    one, silent = ranks(), ranks()
    silent.forward().backward()
    one.forward().backward()
    monkeypatch.setattr(silent.manager._agreement, "stepped", lambda: None)
    (optimizer,) = optimizers(one)
    step(optimizer)
    with caplog.at_level(logging.WARNING, "tiered_mem"):
        one.forward().backward()
        one.forward()
    (record,) = caplog.records
    assert f"process {os.getpid()} did not say in 0 s whether the budget" in record.message


def test_who_ends_early_is_not_waited_for(ranks: Callable[..., Rank]) -> None:
    one, early, failed = ranks(), ranks(), ranks()
    for rank in (early, failed, one):
        rank.forward().backward()
    early.manager.close()
    with pytest.raises(RuntimeError, match="of its own"), failed.manager:
        raise RuntimeError("an error of its own")
    (optimizer,) = optimizers(one)
    step(optimizer)
    one.forward()


def test_where_no_optimizer_of_torchs_steps_a_rank_ends_alone(
    ranks: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "_WITHOUT_STEP", 4)
    one, small = ranks(), ranks(WEIGHTS // 2)
    for _ in range(3):
        small.forward().backward()
    with pytest.raises(BudgetTooSmall, match="is below"):
        small.forward()
    for _ in range(6):
        one.forward().backward()


def test_a_single_rank_is_as_ever(ranks: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    small = ranks(WEIGHTS // 2)
    small.forward().backward()
    with pytest.raises(BudgetTooSmall, match="is below"):
        small.forward()


def test_a_forgotten_manager_leaves_nothing_that_acts(ranks: Callable[..., Rank]) -> None:
    """Its optimizer goes on."""
    rank = Rank(str(ranks().x.device), torch.get_device_module(), ENOUGH)
    rank.forward().backward()
    (optimizer,) = optimizers(rank)
    del rank.manager, rank.context
    gc.collect()
    step(optimizer)
