"""Steps with states on disk, and a drive that fails: no wrong number, and no bucket of two steps at once."""

from __future__ import annotations

import errno
import gc
import logging
import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import RACES
from tests.optimizer.kill_steps import check
from tests.optimizer.training import OPTIMIZERS, differences, give_gradients, make_params, outcome, train
from tests.spill.faulty_files import NOTHING, FaultyFiles
from tests.spilling import records_in
from tiered_mem import TieringManager
from tiered_mem.errors import CorruptRecord, InterruptedStep, TierFull
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer
from tiered_mem.spill.disk_tier import DiskTier

SHAPES = [(32, 32)] * 24
BUCKET_BYTES = 32 << 10  # two parameters in each bucket, and more buckets than slots


class Rig:
    """AdamW with its states on a drive that fails as it is told."""

    def __init__(self, device: str, folder: Path, host_bytes: str = "8MiB") -> None:
        self.files = FaultyFiles()
        self.now = 0.0
        self.device = device
        self.params = make_params(device, shapes=SHAPES)
        disk = DiskTier(folder, capacity=16 << 20, files=self.files, clock=lambda: self.now)
        self.manager = TieringManager(policy="lru", device=device, host_bytes=host_bytes, disk=disk)
        self.tiered: TieredOptimizer = self.manager.register_optimizer(
            OPTIMIZERS["adamw"](self.params), bucket_bytes=BUCKET_BYTES, residency="disk"
        )

    def right(self, steps: int, *, missing: bool = True) -> bool:
        """Whether all is as after so many steps of an optimizer that is not tiered."""
        params = make_params(self.device, shapes=SHAPES)
        plain = OPTIMIZERS["adamw"](params)
        train(plain, params, range(steps), missing=missing)
        return not differences(outcome(plain, params), outcome(self.tiered, self.params))


def assert_said(error: BaseException, rig: Rig, before: list[torch.Tensor], kind: type[OSError]) -> None:
    """The error tells which parameters have been stepped: those of the buckets that had been read before."""
    stepped = 2 * error.stepped if isinstance(error, InterruptedStep) else 0
    assert isinstance(error.__cause__ if isinstance(error, InterruptedStep) else error, kind)
    changed = [not torch.equal(*pair) for pair in zip(rig.params, before, strict=True)]
    assert changed == [True] * stepped + [False] * (len(changed) - stepped)


@pytest.fixture
def rig(device: str, tmp_path: Path) -> Rig:
    rig = Rig(device, tmp_path)
    yield rig
    rig.manager.close()
    assert rig.manager.stats()["host.slots"] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", [errno.ENOSPC, errno.EIO, NOTHING])
@pytest.mark.parametrize("operation", ["create", "pwrite", "allocate"])
@pytest.mark.parametrize("skip", [0, 5])
def test_a_write_that_fails_costs_no_number(operation: str, how: int, skip: int, rig: Rig) -> None:
    if how == NOTHING and operation != "pwrite":
        pytest.skip("only a write can take nothing")
    for begin in range(0, 6, 2):
        rig.files.fail(operation, how, skip=skip, times=3)
        train(rig.tiered, rig.params, range(begin, begin + 2))
        rig.files.heal()
        rig.now += 100
    assert rig.right(6)


def test_a_drive_that_is_full_for_ever_costs_host_memory(rig: Rig) -> None:
    train(rig.tiered, rig.params, range(2))
    rig.manager.synchronize()
    rig.files.fail("pwrite", errno.ENOSPC, times=float("inf"))
    before = rig.manager.stats()["host.used.current"]
    train(rig.tiered, rig.params, range(2, 6))
    assert rig.manager.stats()["host.used.current"] > before
    assert rig.right(6)


def test_neither_disk_nor_host(device: str, tmp_path: Path) -> None:
    """It is said with numbers, and before the parameters of that bucket are touched."""
    rig = Rig(device, tmp_path, host_bytes="160KiB")
    train(rig.tiered, rig.params, range(2), missing=False)
    rig.manager.synchronize()
    saved = rig.tiered.state_dict()
    weights = [param.detach().clone() for param in rig.params]
    rig.files.fail("pwrite", errno.ENOSPC, times=float("inf"))
    with pytest.raises(InterruptedStep) as caught:
        train(rig.tiered, rig.params, range(2, 6), missing=False)
    cause = caught.value.__cause__
    assert isinstance(cause, TierFull)
    assert "disk takes nothing" in str(cause)
    stepped = sum(not torch.equal(param, weight) for param, weight in zip(rig.params, weights, strict=True))
    assert stepped == 2 * caught.value.stepped
    del caught, cause
    rig.files.heal()
    rig.now += 100
    rig.tiered.load_state_dict(saved)
    with torch.no_grad():
        for param, weight in zip(rig.params, weights, strict=True):
            param.copy_(weight)
    train(rig.tiered, rig.params, range(2, 4), missing=False)
    assert rig.right(4, missing=False)
    rig.manager.close()


@pytest.mark.parametrize("bucket", [0, 1, 4, 9])
def test_a_read_that_fails(bucket: int, rig: Rig) -> None:
    """Before the first bucket the step can be made again; later only a checkpoint helps."""
    train(rig.tiered, rig.params, range(2), missing=False)
    rig.manager.synchronize()
    saved = rig.tiered.state_dict()
    weights = [param.detach().clone() for param in rig.params]
    rig.files.fail("pread", errno.EIO, skip=2 * bucket)  # one for the header, one for the bytes
    give_gradients(rig.params, 2, missing=False)
    with pytest.raises((OSError, InterruptedStep)) as caught:
        rig.tiered.step()
    rig.files.heal()
    changed = [not torch.equal(*pair) for pair in zip(rig.params, weights, strict=True)]
    if isinstance(caught.value, InterruptedStep):
        stepped = 2 * caught.value.stepped
        assert stepped > 0
        assert changed == [True] * stepped + [False] * (len(changed) - stepped)
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(InterruptedStep):
            rig.tiered.step()
        rig.tiered.load_state_dict(saved)
        with torch.no_grad():
            for param, weight in zip(rig.params, weights, strict=True):
                param.copy_(weight)
    else:
        assert not any(changed)
    train(rig.tiered, rig.params, range(2, 4), missing=False)
    assert rig.right(4, missing=False)


def test_a_record_that_was_changed_behind_our_back(rig: Rig, tmp_path: Path) -> None:
    train(rig.tiered, rig.params, range(2), missing=False)
    rig.manager.synchronize()
    for path in records_in(tmp_path):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    weights = [param.detach().clone() for param in rig.params]
    give_gradients(rig.params, 2, missing=False)
    with pytest.raises((CorruptRecord, InterruptedStep)) as caught:
        rig.tiered.step()
    assert_said(caught.value, rig, weights, CorruptRecord)


def test_a_directory_that_is_gone(rig: Rig, tmp_path: Path) -> None:
    """States that are on disk are lost with it: that is said."""
    train(rig.tiered, rig.params, range(2), missing=False)
    rig.manager.synchronize()
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    give_gradients(rig.params, 2, missing=False)
    weights = [param.detach().clone() for param in rig.params]
    with pytest.raises((OSError, InterruptedStep)) as caught:
        rig.tiered.step()
    assert_said(caught.value, rig, weights, OSError)


def test_no_room_on_disk_at_registration(device: str, tmp_path: Path) -> None:
    params = make_params(device, shapes=SHAPES)
    optimizer = OPTIMIZERS["adamw"](params)
    manager = TieringManager(
        policy="lru", device=device, host_bytes="8MiB", spill_dir=tmp_path, spill_bytes="128KiB"
    )
    with (
        manager,
        pytest.raises(TierFull, match=r"disk tier: needed 192\.0 KiB, free 128\.0.*raise spill_bytes"),
    ):
        manager.register_optimizer(optimizer, bucket_bytes=BUCKET_BYTES, residency="disk")
    train(optimizer, params, range(1))


def test_without_a_disk_tier(device: str) -> None:
    optimizer = OPTIMIZERS["adamw"](make_params(device))
    manager = TieringManager(policy="lru", device=device, host_bytes="8MiB")
    with manager, pytest.raises(ValueError, match="needs a disk tier: make the manager with a spill_dir"):
        manager.register_optimizer(optimizer, residency="disk")


def test_no_host_room_for_the_slots(device: str, tmp_path: Path) -> None:
    """The error tells how much would have been enough, and that is true."""
    optimizer = OPTIMIZERS["adamw"](make_params(device, shapes=[(1024, 1024)] * 2 + [(256, 256)] * 9))
    host_bytes = 1 << 20
    for least in (None, "the least", "one page less"):
        manager = TieringManager(policy="lru", device=device, host_bytes=host_bytes, spill_dir=tmp_path)
        if least == "the least":
            with manager:
                tiered = manager.register_optimizer(optimizer, bucket_bytes="2MiB", residency="disk")
                assert tiered.host_bytes == host_bytes == manager.stats()["host.used.current"]
            optimizer = OPTIMIZERS["adamw"](make_params(device, shapes=[(1024, 1024)] * 2 + [(256, 256)] * 9))
            host_bytes -= 4096
            continue
        words = (
            r"on their ways to disk and back, 2 of 8\.0 MiB and 5 of 1\.0 MiB: host_bytes=(\d+) \(21\.0 MiB\) is"
        )
        with manager, pytest.raises(TierFull, match=words) as caught:
            manager.register_optimizer(optimizer, bucket_bytes="2MiB", residency="disk")
        assert manager.stats()["host.slots"] == 0
        host_bytes = int(str(caught.value).partition("host_bytes=")[2].partition(" ")[0])
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_the_slots_are_told_of(device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When an optimizer is registered, and for as long as it is."""
    caplog.set_level(logging.INFO, "tiered_mem.optimizer")
    params = make_params(device, shapes=SHAPES)
    with TieringManager(policy="lru", device=device, host_bytes="8MiB", spill_dir=tmp_path) as manager:
        tiered = manager.register_optimizer(
            OPTIMIZERS["adamw"](params), bucket_bytes=BUCKET_BYTES, residency="disk"
        )
        assert tiered.host_bytes == 8 * BUCKET_BYTES // 2 == manager.stats()["host.used.current"]
        assert "the states of AdamW pass through 128.0 KiB of host memory on their ways" in caplog.text
        train(tiered, params, range(2))
        assert tiered.host_bytes == 8 * BUCKET_BYTES // 2


def test_slots_that_have_become_too_small_are_given_back(device: str, tmp_path: Path) -> None:
    """The states of LBFGS grow, each time into larger slots."""
    params = make_params(device, shapes=[(4096,)])
    with TieringManager(policy="lru", device=device, host_bytes="8MiB", spill_dir=tmp_path) as manager:
        lbfgs = torch.optim.LBFGS(params, lr=0.1, max_iter=2, history_size=8)
        tiered = manager.register_optimizer(lbfgs, residency="disk")

        def closure() -> torch.Tensor:
            tiered.zero_grad()
            loss = params[0].pow(4).sum()
            loss.backward()
            return loss.detach()

        for _ in range(5):
            tiered.step(closure)  # type: ignore[arg-type]
            manager.synchronize()
            assert tiered.host_bytes <= tiered.step_bytes + 4096
            assert manager.stats()["host.used.current"] <= tiered.step_bytes + 8192
        assert tiered.step_bytes > 10 * params[0].nbytes


@pytest.mark.slow(why="it kills process after process")
@pytest.mark.skipif(RACES, reason="it runs on the cpu, in processes of its own")
def test_kills_in_the_midst_of_steps() -> None:
    """What is left on disk is of no use to anybody, is swept, and the checkpoint is enough."""
    assert check(times=1, seed=0) >= 1
