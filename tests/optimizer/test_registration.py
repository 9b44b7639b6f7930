"""An optimizer is registered as a whole, or it is as it was before."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.conftest import KIND
from tests.optimizer.conftest import MakeTiered
from tests.optimizer.rig import DeclaredFaults
from tests.optimizer.strange_optimizers import Around, Clipped, Langevin, Skipping
from tests.optimizer.training import (
    RESIDENCIES,
    differences,
    give_gradients,
    make_params,
    outcome,
    train,
)
from tiered_mem import TieringManager
from tiered_mem.errors import TierFull
from tiered_mem.optimizer.trial import HOOKS
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
        self.hooks = [getattr(optimizer, name) for name in HOOKS]

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
        assert all(getattr(self.optimizer, name) is hooks for name, hooks in zip(HOOKS, self.hooks, strict=True))

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
            assert [bucket.params for bucket in optimizer.states.buckets.all] != []
        train(optimizer, params, range(3))
        results.append(outcome(optimizer, params))
    assert not differences(*results)


def test_the_defaults_are_left_alone(device: str, make_tiered: MakeTiered) -> None:
    """A group that is added later has the options that it has without tiering."""
    groups = []
    for tier in (False, True):
        params = make_params(device)
        optimizer: Optimizer = torch.optim.Adafactor(params[:2])
        names = set(optimizer.defaults)
        if tier:
            optimizer = make_tiered(optimizer)
            assert set(optimizer.wrapped.defaults) == names  # type: ignore[attr-defined]
        optimizer.add_param_group({"params": params[2:]})
        groups.append([set(group) for group in optimizer.param_groups])
    assert groups[0] == groups[1]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # by torch, of its own deepcopy
def test_a_learning_rate_that_groups_share(device: str, make_tiered: MakeTiered) -> None:
    """It is one tensor in a state_dict, and after loading that: a change of it is one of all groups."""
    results = []
    for tier in (False, True):
        params = make_params(device)
        rate = torch.tensor(0.1)
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        optimizer: Optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9, foreach=False)
        if tier:
            optimizer = make_tiered(optimizer)
        give_gradients(params, 0)
        optimizer.step()
        saved = optimizer.state_dict()
        assert saved["param_groups"][0]["lr"] is saved["param_groups"][1]["lr"]
        optimizer.load_state_dict(saved)
        one, other = (group["lr"] for group in optimizer.param_groups)
        assert one is other
        one.mul_(0.5)
        give_gradients(params, 1)
        optimizer.step()
        results.append(outcome(optimizer, params))
    assert not differences(*results)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("separable", [None, True, False])
def test_sparse_adam_with_several_parameters(separable: bool | None) -> None:
    """On the cpu, as torch_npu has no sparse tensors."""
    results = []
    for tier in (False, True):
        torch.manual_seed(0)
        tables = [torch.nn.Embedding(20, 4, sparse=True) for _ in range(3)]
        params = [table.weight for table in tables]
        optimizer: Optimizer = torch.optim.SparseAdam(params)
        with TieringManager(policy="lru", device="cpu", host_bytes="16MiB") as manager:
            if tier:
                optimizer = manager.register_optimizer(optimizer, bucket_bytes=1, separable=separable)
            for step in range(5):
                for table in tables:
                    table(torch.tensor([step, 3, 7])).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(outcome(optimizer, params))
    assert not differences(*results)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("sparse_first", [False, True])
@pytest.mark.parametrize("separable", [None, True])
def test_a_step_that_is_refused_changes_nothing(separable: bool | None, sparse_first: bool) -> None:
    """As in torch: the optimizer can be used afterwards, and saved."""
    kind = torch.optim.AdamW if separable is None else Clipped.__base__
    results = []
    for tier in (False, True):
        torch.manual_seed(0)
        table, linear = torch.nn.Embedding(20, 4, sparse=True), torch.nn.Linear(4, 4)
        modules = [table, linear] if sparse_first else [linear, table]
        params = [param for module in modules for param in module.parameters()]
        optimizer: Optimizer = kind(params)  # type: ignore[misc]
        with TieringManager(policy="lru", device="cpu", host_bytes="16MiB") as manager:
            if tier:
                optimizer = manager.register_optimizer(optimizer, bucket_bytes=1, separable=separable)
            give_gradients(params, 0, missing=False)
            optimizer.step()
            saved = [param.detach().clone() for param in params]
            linear(table(torch.tensor([1, 2]))).sum().backward()
            table.weight.grad = torch.ones_like(table.weight).to_sparse(1)
            with pytest.raises(RuntimeError, match="does not support sparse gradients, please consider SparseAdam"):
                optimizer.step()
            assert all(torch.equal(*pair) for pair in zip(params, saved, strict=True))
            optimizer.load_state_dict(optimizer.state_dict())
            give_gradients(params, 1, missing=False)
            optimizer.step()
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


@pytest.mark.parametrize(("separable", "own"), [(None, False), (True, True), (True, False)])
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_random_numbers_are_drawn_in_the_same_order(
    residency: str, separable: bool | None, own: bool, device: str, make_tiered: MakeTiered
) -> None:
    """However parameters lie in buckets: with groups, frozen ones, ones without state, and ones that come later."""
    results = []
    for tier in (False, True):
        params = make_params(
            device, shapes=[(9, 9), (7,), (30, 30), (3, 3), (5,), (20, 20), (2, 2), (31, 31), (4, 4)]
        )
        params[3].requires_grad_(False)
        generator = torch.Generator().manual_seed(7) if own else None
        groups = [{"params": params[:4]}, {"params": params[4:7]}]
        optimizer: Any = Langevin(groups, generator=generator)  # type: ignore[arg-type]
        if tier:
            optimizer = make_tiered(optimizer, residency=residency, separable=separable, bucket_bytes=4096)
        torch.manual_seed(3)
        for step in range(8):
            give_gradients(params, step)
            if step == 3:
                optimizer.add_param_group({"params": params[7:8]})
            if step == 5:
                optimizer.param_groups[0]["params"].append(params[8])
            if step == 6:
                params[3].requires_grad_(True)
            if step < 6:
                params[3].grad = None
            optimizer.step()
        results.append((outcome(optimizer, params), torch.rand(1)))
    assert not differences(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("separable", [None, True])
def test_the_trial_leaves_generators_alone(separable: bool | None, device: str, make_tiered: MakeTiered) -> None:
    generator = torch.Generator().manual_seed(5)
    optimizer = Langevin(make_params(device), generator=generator)
    before = generator.get_state()
    make_tiered(optimizer, separable=separable)
    assert torch.equal(generator.get_state(), before)


def test_a_parameter_that_is_there_twice(device: str, make_tiered: MakeTiered) -> None:
    """Torch warns of it, and steps it twice."""
    results = []
    for tier in (False, True):
        params = make_params(device)
        optimizer: Any = torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False)
        if tier:
            optimizer = make_tiered(optimizer, bucket_bytes=1)
        optimizer.param_groups[0]["params"].append(params[1])
        train(optimizer, params, range(4), missing=False)
        results.append([param.detach().cpu() for param in params])
    assert all(map(torch.equal, *results))


def test_a_schedulers_step_is_known_and_anybody_elses_is_not(device: str, make_tiered: MakeTiered) -> None:
    for own in (False, True):
        optimizer = torch.optim.AdamW(make_params(device))
        if own:
            optimizer.step = functools.partial(torch.optim.AdamW.step, optimizer)  # type: ignore[method-assign]
        else:
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
        assert make_tiered(optimizer).at_once is own


def test_adafactor_takes_an_epsilon_of_the_first_parameter(device: str, make_tiered: MakeTiered) -> None:
    """With parameters of several types in a group, torch's own is not as with each of them alone."""
    results = []
    for tier in (False, True):
        params = [*make_params(device, torch.bfloat16)[:2], *make_params(device)[2:]]
        optimizer: Any = torch.optim.Adafactor(params)
        if tier:
            optimizer = make_tiered(optimizer, bucket_bytes=1)
            assert optimizer.at_once
        for step in range(4):
            give_gradients(params, step, missing=False)
            for param in params:
                param.grad.mul_(1e-7)
            optimizer.step()
        results.append(outcome(optimizer, params))
    assert not differences(*results)
    assert not make_tiered(torch.optim.Adafactor(make_params(device))).at_once


@pytest.mark.skipif(KIND == "cpu", reason="there are no two devices")
@pytest.mark.parametrize("later", [False, True])
def test_a_group_with_parameters_on_two_devices(later: bool, device: str, make_tiered: MakeTiered) -> None:
    """For all of a group together torch chooses whether to step them with its kernels for lists."""
    for foreach in (None, True):
        params = [*make_params(device)[:3], *make_params("cpu")[3:]]
        groups = [{"params": params[:3] if later else params}]
        tiered = make_tiered(torch.optim.NAdam(groups, foreach=foreach), bucket_bytes=1)
        assert tiered.at_once is (foreach is None and not later)
        if later:
            tiered.param_groups[0]["params"].extend(params[3:])
        train(tiered, params, range(3))
        expected = [*make_params(device)[:3], *make_params("cpu")[3:]]
        plain = torch.optim.NAdam(expected, foreach=foreach)
        train(plain, expected, range(3))
        assert not differences(outcome(plain, expected), outcome(tiered, params))
