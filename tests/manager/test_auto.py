"""policy="auto": the manager is told how much device memory there is, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.peak import Peak
from tests.conftest import Link
from tiered_mem import TieringManager
from tiered_mem.choose_policy import PolicyChoice
from tiered_mem.device.device import Device
from tiered_mem.policies import Event, LayerOrderPolicy, LRUPolicy, PlannedPolicy
from tiered_mem.policies import Link as LinkRates
from tiered_mem.policies.actions import Advice
from tiered_mem.policies.base import StepBegin
from tiered_mem.policies.planning import BudgetTooSmall

STEPS = 5
LARGEST = 256 << 10  # block


def make(device: str) -> tuple[nn.Module, torch.Tensor]:
    """Eight layers that save 1 MiB each, most of it in pieces of 256 KiB."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128)) for _ in range(8)))
    return model.to(device), torch.randn(512, 128).to(device)


def train(model: nn.Module, x: torch.Tensor, steps: int = STEPS, lengths: list[int] | None = None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        rows = x if lengths is None else x[: lengths[step]]
        loss = model(rows).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def plain(device: str, device_module: ModuleType) -> tuple[list[float], int, int]:
    """Losses of the plain run, its peak, and what is there before it."""
    model, x = make(device)
    floor = device_module.memory_allocated()
    device_module.reset_peak_memory_stats()
    losses = train(model, x)
    return losses, device_module.max_memory_allocated(), floor


@pytest.mark.parametrize("share", [0.8, 0.6, 0.45])
def test_the_budget_is_kept_and_the_losses_are_those_of_the_plain_run(
    device: str, device_module: ModuleType, plain: tuple[list[float], int, int], share: float, link: Link
) -> None:
    losses, peak, floor = plain
    budget = int(floor + share * (peak - floor))
    model, x = make(device)
    link("1GB/s")
    with (
        TieringManager(policy="auto", device_budget=budget, device=device, host_bytes="32MiB") as manager,
        manager.attach(model, min_bytes=4096),
    ):
        most = Peak(device_module)
        assert train(model, x) == losses
        assert most.read() <= budget
        assert manager.stats()["released.bytes.total"] != 0


@pytest.mark.parametrize("share", [0.8, 0.6, 0.45])
def test_the_budget_is_kept_while_ways_to_compute_again_are_tried(
    device: str, device_module: ModuleType, plain: tuple[list[float], int, int], share: float
) -> None:
    _, peak, floor = plain
    budget = int(floor + share * (peak - floor))
    steps = 12
    model, x = make(device)
    losses = train(model, x, steps)
    model, x = make(device)
    policy = PlannedPolicy(budget, LinkRates(1e9, 1e9), margin=budget // 16, try_all=True)
    with TieringManager(policy=policy, device=device, host_bytes="32MiB") as manager:
        manager.attach(model, min_bytes=4096)
        most = Peak(device_module)
        assert train(model, x, steps) == losses
        assert most.read() <= budget


def test_what_fits_does_not_move(device: str, plain: tuple[list[float], int, int]) -> None:
    losses, peak, _ = plain
    model, x = make(device)
    with (
        TieringManager(policy="auto", device_budget=2 * peak, device=device, host_bytes="32MiB") as manager,
        manager.attach(model, min_bytes=4096),
    ):
        first = train(model, x, 2)
        moved = manager.stats()["offloaded.bytes.total"]
        assert first == losses[:2]
        train(model, x, 3)
        assert manager.stats()["offloaded.bytes.total"] == moved


def test_lengths_that_change_keep_the_budget(
    device: str, device_module: ModuleType, plain: tuple[list[float], int, int], link: Link
) -> None:
    _, peak, floor = plain
    budget = int(floor + 0.6 * (peak - floor))
    lengths = [512, 128, 512, 256, 384, 512, 64, 448]
    model, x = make(device)
    expected = train(model, x, len(lengths), lengths)
    model, x = make(device)
    link("1GB/s")
    with (
        TieringManager(policy="auto", device_budget=budget, device=device, host_bytes="32MiB") as manager,
        manager.attach(model, min_bytes=4096),
    ):
        most = Peak(device_module)
        assert train(model, x, len(lengths), lengths) == expected
        assert most.read() <= budget + LARGEST  # as it is told of a block when that is there


@pytest.mark.parametrize("share", [0.6, 0.35])
def test_what_the_host_cannot_hold_goes_to_disk_by_plan(
    device: str, plain: tuple[list[float], int, int], share: float, link: Link, tmp_path: Path
) -> None:
    """What is computed again depends on measured times, and does not move: here nothing is."""
    losses, peak, floor = plain
    budget = int(floor + 0.45 * (peak - floor))
    link("1GB/s")

    def run(host_bytes: int, folder: Path | None) -> dict[str, Any]:
        model, x = make(device)
        disk = {} if folder is None else {"spill_dir": folder, "spill_bytes": "64MiB"}
        with (
            TieringManager(
                policy="auto", device_budget=budget, recompute=False, device=device, host_bytes=host_bytes, **disk
            ) as manager,
            manager.attach(model, min_bytes=4096),
        ):
            assert train(model, x) == losses
            return dict(manager.stats())

    leaves = run(32 << 20, None)["host.used.peak"]
    stats = run(int(share * leaves), tmp_path)
    assert stats["host.used.peak"] <= share * leaves
    assert stats["spilled.bytes.total"] >= 2 * (1 - share) * leaves  # more than the first step alone
    assert stats["kept.blocks.total"] == 0


def test_a_plain_optimizer_that_takes_too_much_is_an_error_that_says_so(
    device: str, device_module: ModuleType
) -> None:
    """AdamW has two states for each weight, and works on all of them at once; the batch is small."""
    model, x = make(device)
    weights = sum(each.nbytes for each in model.parameters())
    budget = device_module.memory_allocated() + 2 * weights
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        TieringManager(device_budget=budget, device=device, host_bytes="32MiB") as manager,
        manager.attach(model, min_bytes=4096),
    ):
        model(x[:64]).pow(2).mean().backward()
        optimizer.step()
        with pytest.raises(ValueError, match=r"step, .*, takes .* MiB: register the optimizer") as caught:
            model(x[:64])
    assert isinstance(caught.value, BudgetTooSmall)
    assert caught.value.floor >= budget + weights


def test_an_optimizer_that_is_registered_is_not_advised_to_be(
    device: str, device_module: ModuleType, caplog: pytest.LogCaptureFixture, no_gc: None
) -> None:
    model, x = make(device)
    device_module.synchronize()
    device_module.empty_cache()  # what other tests have left must not go while this one runs
    budget = device_module.memory_allocated() + 2 * sum(each.nbytes for each in model.parameters())
    with (
        TieringManager(device_budget=budget, device=device, host_bytes="64MiB") as manager,
        manager.attach(model, min_bytes=4096),
    ):
        optimizer = manager.register_optimizer(torch.optim.AdamW(model.parameters()), separable=False)
        model(x[:64]).pow(2).mean().backward()
        optimizer.step()
        with pytest.raises(BudgetTooSmall, match="register it with separable=True"):
            model(x[:64])
    assert "register_optimizer" not in caplog.text


def test_arguments(device: str, device_module: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"device_budget and slowdown are for policy='auto'"):
        TieringManager(policy=LayerOrderPolicy(), device=device, device_budget="1GiB")
    with pytest.raises(
        ValueError, match=r"the device has [0-9.]+ GiB, of which this process can use .*: give at most that"
    ):
        TieringManager(policy="auto", device=device, device_budget="1TiB", host_bytes="8MiB")


@pytest.mark.parametrize("value", ["5%", True, [0.1]])
def test_a_slowdown_is_a_number(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^slowdown must be a number, not "):
        TieringManager(device="cpu", slowdown=value)


@pytest.mark.parametrize("value", [-1, -0.1, math.inf, math.nan, 10**500])
def test_a_slowdown_is_finite_and_at_least_0(value: float) -> None:
    with pytest.raises(ValueError, match=r"^slowdown must be 0 or more, and finite, not "):
        TieringManager(device="cpu", slowdown=value)


@pytest.mark.parametrize("value", [10**500, "9" * 500, 0, "much", "1GiB/s", True])
def test_a_budget_is_a_size_on_any_device(value: Any) -> None:
    with pytest.raises(ValueError, match="size") as caught:
        TieringManager(device="cpu", device_budget=value)
    assert len(str(caught.value)) < 200


def test_on_the_cpu_a_budget_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with TieringManager(device="cpu", device_budget="60GiB", slowdown=0.1, host_bytes="8MiB"):
        pass
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.getMessage().startswith("cpu counts no memory that could be planned for")
    assert warning.getMessage().endswith("without the device_budget and slowdown that are given")


@pytest.mark.slow(why="it fills all of the device")
def test_it_is_the_default(device: str, device_module: ModuleType, plain: tuple[list[float], int, int]) -> None:
    losses, peak, _ = plain
    model, x = make(device)
    spare = device_module.mem_get_info()[0] + device_module.memory_reserved() - peak
    with TieringManager() as manager, manager.attach(model, min_bytes=4096):
        assert manager.device.kind == device
        hog = torch.empty(spare, dtype=torch.uint8, device=device)
        assert train(model, x) == losses
        assert manager.stats()["released.bytes.total"] != 0
        del hog
    device_module.empty_cache()  # later tests fill what the pool has in small pieces


def test_on_the_cpu_the_default_moves_all_layers() -> None:
    model, x = make("cpu")
    expected = train(model, x)
    model, x = make("cpu")
    with TieringManager(device="cpu", host_bytes="32MiB") as manager, manager.attach(model, min_bytes=4096):
        assert train(model, x) == expected
        assert manager.stats()["released.bytes.total"] != 0


def test_lru_by_its_name_keeps_a_quarter_of_the_device(device: str, device_module: ModuleType) -> None:
    _, total = device_module.mem_get_info()
    made = PolicyChoice("lru", None, None).on(Device(device), None)
    assert vars(made) == vars(LRUPolicy(total // 4))
    assert vars(PolicyChoice("lru", None, None).on(Device("cpu"), None)) == vars(LRUPolicy())


class CountingSteps(PlannedPolicy):
    """steps: how many have begun."""

    steps = 0

    def decide(self, event: Event) -> Sequence[Advice]:
        self.steps += isinstance(event, StepBegin)
        return super().decide(event)


def test_a_step_with_several_forwards_under_way_is_one_where_all_has_room(device: str) -> None:
    """As a pipeline's are: the next forward begins when the first backward is over."""
    model, x = make(device)
    policy = CountingSteps("4GiB", LinkRates(1e9, 1e9))
    with TieringManager(policy=policy, device=device) as manager, manager.attach(model, min_bytes="1KiB"):
        for _ in range(8):
            under_way = [model(x).pow(2).mean() for _ in range(3)]
            for _ in range(3):
                under_way.pop(0).backward()
                under_way.append(model(x).pow(2).mean())
            while under_way:
                under_way.pop(0).backward()
        assert policy.steps == 8
