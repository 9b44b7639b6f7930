"""Each tier below host memory keeps the contract, and a training is the same over each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import allocated, eventually, is_empty, stack
from tests.optimizer.training import OPTIMIZERS, make_params, train
from tests.spill.disks import MIB, disk_in, drives_in
from tests.spill.faulty_files import FaultyFiles
from tests.spilling import Training
from tests.tiers.lower_tier_contract import CONTRACT, Subject
from tests.tiers.remote_tier import RemoteTier
from tiered_mem import TierFull, TieringManager
from tiered_mem.policies import LayerOrderPolicy, Link, LRUPolicy, PlannedPolicy, Policy
from tiered_mem.spill.lower_tier import METHODS, LowerTier
from tiered_mem.tiers.measure import measured_tier, room_for


class OnDisk:
    def __init__(self, folder: Path, ends: ExitStack) -> None:
        disk = ends.enter_context(disk_in(folder, capacity=MIB))
        self.tier: LowerTier = disk.tier
        self._files = disk.files

    def fail(self, kind: str) -> None:
        self._files.fail(f"p{kind}")

    def held(self, kind: str) -> AbstractContextManager[Any]:
        return self._files.hold(f"p{kind}")


class OnDrives:
    """Two drives, with one set of faults for both."""

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        self._files = FaultyFiles()
        self.tier: LowerTier = ends.enter_context(closing(drives_in(folder, [self._files] * 2, capacity=MIB)))

    def fail(self, kind: str) -> None:
        self._files.fail(f"p{kind}")

    def held(self, kind: str) -> AbstractContextManager[Any]:
        return self._files.hold(f"p{kind}")


class Remote:
    def __init__(self, folder: Path, ends: ExitStack) -> None:
        self._remote = RemoteTier(MIB)
        self.tier: LowerTier = self._remote

    def fail(self, kind: str) -> None:
        self._remote.broken[kind] = 1

    def held(self, kind: str) -> AbstractContextManager[Any]:
        return nullcontext()  # nothing arrives before somebody asks


@pytest.fixture(params=[OnDisk, OnDrives, Remote])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    with ExitStack() as ends:
        yield request.param(tmp_path, ends)


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_the_contract_of_lower_tiers(check: Callable[[Subject], None], subject: Subject) -> None:
    check(subject)


POLICIES: dict[str, Callable[[], Policy]] = {
    "layer order": LayerOrderPolicy,
    "LRU": lambda: LRUPolicy(device_bytes=8 * MIB),
    "planned": lambda: PlannedPolicy(allocated() + 24 * MIB, Link(1e9, 1e9)),
    "planned spills": lambda: PlannedPolicy(
        allocated() + 24 * MIB,
        Link(1e9, 1e9, drive=Link(1e8, 1e8)),
        host_bytes=2 * MIB,
    ),
}


@pytest.mark.parametrize("looks", [0, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_over_a_remote_tier(policy: str, looks: int, device: str, training: Training) -> None:
    remote = RemoteTier(256 * MIB, looks=looks)
    with TieringManager(policy=POLICIES[policy](), device=device, host_bytes=2 * MIB, disk=remote) as manager:
        for _ in range(3):
            assert training.step(manager)
        stats = manager.stats()
        assert stats["kept.bytes.total"] == 0
        assert eventually(lambda: is_empty(manager))
        assert stats["disk.written.total"] > 4 * MIB
        assert stats["disk.read.total"] > 4 * MIB
        assert stats["fetched.bytes.total"] == stats["disk.read.total"]
    assert (remote.stats().records, remote.accepts(1)) == (0, False)


@pytest.mark.parametrize("name", ["adamw", "adam-foreach", "sgd-momentum"])
def test_a_tiered_optimizer_over_a_remote_tier(name: str, device: str) -> None:
    weights = []
    for tiered in (False, True):
        params = make_params(device)
        optimizer = OPTIMIZERS[name](params)
        if not tiered:
            train(optimizer, params, range(6))
        else:
            remote = RemoteTier(MIB)
            with TieringManager(policy="lru", device=device, host_bytes="1MiB", disk=remote) as manager:
                train(manager.register_optimizer(optimizer, bucket_bytes=1024, residency="disk"), params, range(6))
                assert manager.stats()["disk.read.total"] > 0
        weights.append([param.detach().cpu() for param in params])
    assert all(map(torch.equal, *weights))


def test_activations_and_states_share_a_remote_tier(device: str) -> None:
    """With a trace, whose times come from the tier's own clock."""
    weights = []
    for remote in (None, RemoteTier(256 * MIB)):
        model, x = stack(3, device)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with ExitStack() as ends:
            if remote is not None:
                tiers = {"host_bytes": "3MiB", "disk": remote, "trace": True}
                manager = ends.enter_context(TieringManager(policy=LRUPolicy("4MiB"), device=device, **tiers))
                manager.attach(model, layers=model.layers, min_bytes=1024)
                optimizer = manager.register_optimizer(optimizer, bucket_bytes="64KiB", residency="disk")
            for _ in range(3):
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
            if remote is not None:
                assert manager.stats()["fetched.bytes.total"] > 0
                assert "written / read" in manager.memory_summary()
        weights.append([parameter.detach().cpu() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("kind", ["write", "read"])
def test_a_wire_that_breaks_costs_no_numbers(kind: str, device: str, training: Training) -> None:
    remote = RemoteTier(256 * MIB)
    with TieringManager(policy=LRUPolicy("8MiB"), device=device, host_bytes=4 * MIB, disk=remote) as manager:
        assert training.step(manager)
        remote.broken[kind] = 3
        loss = training.forward(manager)
        if kind == "write":
            loss.backward()
            assert training.is_right()
        else:
            with pytest.raises(ConnectionError):
                loss.backward()
            training.model.zero_grad()
            del loss
        assert remote.stats().failures > 0
        remote.broken.clear()
        assert training.step(manager)


def test_a_tier_is_measured_by_its_own_clock() -> None:
    """One message at a time takes a millisecond and its bytes, each way alone or both at once."""
    heard: list[int] = []
    tier = RemoteTier(room_for(64 * MIB))
    link = measured_tier(tier, 64 * MIB, rounds=3, moved=heard.append)
    seconds = 1e-3 + 8 * MIB / 1e9
    assert (link.out, link.back, link.both) == pytest.approx((8 * MIB / seconds, 8 * MIB / seconds, 0.5))
    assert link.latency == pytest.approx(1e-3 + 4096 / 1e9)
    assert sum(heard) == 13 * 64 * MIB
    assert (tier.stats().records, tier.stats().used) == (0, 0)


def test_a_tier_that_fails_or_is_too_small_is_not_measured() -> None:
    broken, small = RemoteTier(64 * MIB), RemoteTier(room_for(4 * MIB) // 2)
    broken.broken["write"] = 1
    for tier, error in ((broken, ConnectionError), (small, TierFull)):
        with pytest.raises(error):
            measured_tier(tier, 4 * MIB)
        assert tier.stats().records == 0


def test_what_lacks_a_method_is_no_tier(device: str) -> None:
    class Almost:
        accepts = write = read = release = stats = watch = now = staticmethod(lambda *args: None)

    for disk, words in (
        (Almost(), rf"disk must have the methods {', '.join(METHODS)}; .*Almost.* has no close"),
        (RemoteTier, r"disk must be an object, and RemoteTier is a class: call it, RemoteTier\(...\)"),
    ):
        with pytest.raises(TypeError, match=words):
            TieringManager(device=device, host_bytes="1MiB", disk=disk)
