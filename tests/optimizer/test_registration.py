"""An optimizer is registered as a whole, or it is as it was before."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.optimizer.conftest import MakeTiered
from tests.optimizer.rig import DeclaredFaults
from tests.optimizer.strange_optimizers import Around, Clipped, Skipping
from tests.optimizer.training import (
    RESIDENCIES,
    differences,
    make_params,
    outcome,
    train,
)
from tiered_mem import TieringManager
from tiered_mem.device.torch_private import OPTIMIZER_HOOKS
from tiered_mem.errors import TierFull
from tiered_mem.spill.disk_tier import DiskTier

SHAPES = [(32, 32)] * 24
BUCKET_BYTES = 32 << 10  # 12 buckets


class Before:
    """What an optimizer has, to be compared with what it has later."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.state = optimizer.state
        self.states = {key: (state, dict(state)) for key, state in optimizer.state.items()}
        self.values = [value.clone() for value in self._tensors()]
        self.groups = optimizer.param_groups
        self.hooks = [getattr(optimizer, name) for name in OPTIMIZER_HOOKS]

    def check(self) -> None:
        """It has the same objects, and they have the same bits."""
        assert self.optimizer.state is self.state
        assert list(self.state) == list(self.states)
        for key, (state, values) in self.states.items():
            assert self.state[key] is state
            assert all(state[name] is value for name, value in values.items())
            assert state.keys() == values.keys()
        assert all(torch.equal(*pair) for pair in zip(self._tensors(), self.values, strict=True))
        assert self.optimizer.param_groups is self.groups
        assert all(
            getattr(self.optimizer, name) is hooks for name, hooks in zip(OPTIMIZER_HOOKS, self.hooks, strict=True)
        )

    def _tensors(self) -> list[torch.Tensor]:
        return [
            value for state in self.state.values() for value in state.values() if isinstance(value, torch.Tensor)
        ]


def trained(device: str, kind: Callable[..., Optimizer] = torch.optim.AdamW) -> tuple[Optimizer, Any]:
    params = make_params(device, shapes=SHAPES)
    optimizer = kind(params)
    train(optimizer, params, range(3))
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer, params


def test_a_wrapper_is_refused_with_the_name_of_what_it_wraps(device: str, make_tiered: MakeTiered) -> None:
    """That one can be registered, and put back into it."""
    results = []
    for tier in (False, True):
        inner, params = trained(device)
        around = Around(inner)
        if tier:
            before = Before(inner)
            with pytest.raises(ValueError, match=r"Around wraps .* `optimizer\.optimizer = manager\.register_opt"):
                make_tiered(around)
            before.check()
            assert make_tiered.manager.stats()["host.slots"] == 0
            around.optimizer = make_tiered.manager.register_optimizer(around.optimizer)
        train(around, params, range(3, 6))
        results.append(outcome(around.optimizer, params))
    assert not differences(*results)


class Lookalike(torch.optim.SGD):
    """Wraps several in a list, or one so that nobody sees it."""

    def __init__(self, inner: Any) -> None:
        self.__dict__.update(inner)


@pytest.mark.parametrize("how", ["in a list", "out of sight"])
def test_wrappers_of_other_kinds(how: str, device: str, make_tiered: MakeTiered) -> None:
    inner, _ = trained(device)
    before = Before(inner)
    wrapper = Lookalike({"parts": [inner]} if how == "in a list" else {"defaults": {}})
    words = r"register optimizer\.parts" if how == "in a list" else "has no 'param_groups' of its own"
    with pytest.raises(ValueError, match=words):
        make_tiered(wrapper)
    before.check()


class Stubborn(torch.optim.AdamW):
    """Does not let go of one of its hooks, as soon as it is told."""

    stubborn = False

    def __setattr__(self, name: str, value: Any) -> None:
        if self.stubborn and name == "_optimizer_state_dict_post_hooks":
            self.__dict__["stubborn"] = False
            raise AttributeError("these are mine")
        super().__setattr__(name, value)


class Large(torch.optim.SGD):
    """Takes more device memory for a first step than there is."""

    large = True

    def step(self, closure: Any = None) -> Any:
        if self.large and not self.state:
            raise torch.OutOfMemoryError("too large")
        return super().step(closure)


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_hooks_that_cannot_be_had(residency: str, device: str, make_tiered: MakeTiered) -> None:
    optimizer, params = trained(device, Stubborn)
    before = Before(optimizer)
    optimizer.stubborn = True  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="these are mine"):
        make_tiered(optimizer, residency=residency)
    before.check()
    assert make_tiered.manager.stats()["host.slots"] == 0
    train(optimizer, params, range(3, 4))


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_no_device_memory_for_the_trial(residency: str, device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    optimizer = Large(params, lr=0.1, momentum=0.9)
    before = Before(optimizer)
    with pytest.raises(torch.OutOfMemoryError):
        make_tiered(optimizer, residency=residency)
    before.check()
    assert make_tiered.manager.stats()["host.slots"] == 0


@pytest.mark.parametrize("at", [0, 11])
@pytest.mark.parametrize(
    ("residency", "error"),
    [("host", KeyboardInterrupt), ("host", torch.OutOfMemoryError), ("disk", torch.OutOfMemoryError)],
)
def test_a_copy_that_fails(
    error: type[BaseException],
    residency: str,
    at: int,
    device: str,
    make_tiered: MakeTiered,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When some of the states have left already. It can be registered afterwards, and goes on as it was."""
    optimizer, params = trained(device)
    before = Before(optimizer)
    copy, calls = torch._foreach_copy_, 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > at:
            raise error("injected")
        return copy(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "_foreach_copy_", failing)
        with pytest.raises(error, match="injected"):
            make_tiered(optimizer, residency=residency, bucket_bytes=BUCKET_BYTES)
    before.check()
    manager = make_tiered.manager
    manager.synchronize()
    assert manager.stats()["host.used.current"] == 0
    tiered = manager.register_optimizer(optimizer, residency=residency, bucket_bytes=BUCKET_BYTES)
    train(tiered, params, range(3, 6))
    plain, expected = trained(device)
    train(plain, expected, range(3, 6))
    assert not differences(outcome(plain, expected), outcome(tiered, params))


def test_a_disk_that_takes_nothing(device: str, tmp_path: Path) -> None:
    """Some states are in the slots then, and for the others there is no room."""
    optimizer, params = trained(device)
    before = Before(optimizer)
    files = DeclaredFaults()
    disk = DiskTier(tmp_path, capacity=16 << 20, files=files)
    with TieringManager(policy="lru", device=device, host_bytes="128KiB", disk=disk) as manager:
        files.fail("pwrite", errno.EIO, times=float("inf"))
        with pytest.raises(TierFull, match="the disk takes nothing"):
            manager.register_optimizer(optimizer, bucket_bytes=BUCKET_BYTES, residency="disk")
        before.check()
        assert manager.stats()["host.used.current"] == 0
        files.heal()
    train(optimizer, params, range(3, 4))


def test_a_group_whose_states_cannot_leave_is_not_added(device: str, make_tiered: MakeTiered) -> None:
    results = []
    for tier in (False, True):
        params = make_params(device)
        optimizer: Any = torch.optim.AdamW(params)
        if tier:
            optimizer = make_tiered(optimizer, host_bytes="1MiB")
            with pytest.raises(TierFull):
                optimizer.add_param_group({"params": make_params(device, shapes=[(512, 512)])})
            assert [bucket.params for bucket in optimizer.states.pipeline.buckets] != []
        train(optimizer, params, range(3))
        results.append(outcome(optimizer, params))
    assert not differences(*results)


Make = Callable[[Sequence[torch.nn.Parameter]], Optimizer]


class OverGroups(torch.optim.SGD):
    """Has each group's rate depend on the gradients of the one before."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group, before in zip(self.param_groups[1:], self.param_groups, strict=False):
            grads = [param.grad for param in before["params"] if param.grad is not None]
            for param in group["params"]:
                if param.grad is not None and grads:
                    param.grad.mul_(1 + float(grads[0].abs().max()))
        return super().step(closure)


@pytest.mark.parametrize(
    "make",
    [
        lambda params: Clipped(params, lr=0.1),
        lambda params: Skipping(params, lr=0.1),
        lambda params: OverGroups([{"params": params[:2]}, {"params": params[2:]}], lr=0.1),
        lambda params: torch.optim.LBFGS(params),
    ],
    ids=["clipped", "skipping", "over groups", "lbfgs"],
)
def test_a_word_that_is_not_true_is_found_out(make: Make, device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device)
    optimizer = make(params)
    before = Before(optimizer)
    with pytest.raises(ValueError, match="needs all its parameters at once"):
        make_tiered(optimizer, separable=True)
    before.check()
