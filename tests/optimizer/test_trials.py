"""Registration tries an optimizer out, and leaves it and its parameters as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.optimizer.conftest import MakeTiered
from tests.optimizer.strange_optimizers import Langevin
from tests.optimizer.training import make_params

pytestmark = pytest.mark.once(why="a trial compares on the host")


class Averaging(torch.optim.SGD):
    """Keeps tensors of its own, which it changes in each step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        device = self.param_groups[0]["params"][0].device
        self.total = torch.zeros(3, device=device)
        self.kept = {"history": [torch.zeros(3, device=device)]}
        self.state["seen"] = {"total": torch.zeros(3, device=device)}

    def step(self, closure: Any = None) -> Any:
        for own in (self.total, self.kept["history"][0], self.state["seen"]["total"]):
            own.add_(1)
        self.kept["history"].append(self.total.clone())
        return super().step(closure)


def test_what_an_optimizer_keeps_for_itself_is_not_touched(device: str, make_tiered: MakeTiered) -> None:
    optimizer = Averaging(make_params(device))
    tiered = make_tiered(optimizer)
    assert len(optimizer.kept["history"]) == 1
    for own in (optimizer.total, optimizer.kept["history"][0], tiered.state["seen"]["total"]):
        assert own.tolist() == [0, 0, 0]


class Pair(torch.Tensor):
    """A wrapper of two tensors, of which every operation makes another one."""

    def __new__(cls, one: torch.Tensor, two: torch.Tensor) -> Pair:
        return torch.Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype, device=one.device)

    def __init__(self, one: torch.Tensor, two: torch.Tensor) -> None:
        self.one, self.two = one, two

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["one", "two"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Pair:
        return Pair(parts["one"], parts["two"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def of(each: Any, name: str) -> Any:
            return getattr(each, name) if isinstance(each, Pair) else each

        one, two = (func(*[of(each, name) for each in args], **(kwargs or {})) for name in ("one", "two"))
        if func.name().rsplit("::")[-1].split(".")[0].endswith("_"):
            return args[0]
        return Pair(one, two) if isinstance(one, torch.Tensor) else one


@pytest.mark.parametrize("residency", ["host", "device-until-offload"])
def test_a_parameter_that_is_a_wrapper_is_not_touched(device: str, residency: str, make_tiered: MakeTiered) -> None:
    """Its parts are attributes, as others are that it may have. Its states are wrappers, too."""
    results = []
    for each in (None, residency):
        params = [
            torch.nn.Parameter(Pair(torch.ones(size, device=device), torch.zeros(size, device=device)))
            for size in (4, 6)
        ]
        params[0].note = "attribute"
        optimizer: torch.optim.Optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.9, foreach=False)
        if each is not None:
            optimizer = make_tiered(optimizer, residency=each)
        assert all(param.one.eq(1).all() and param.two.eq(0).all() for param in params)
        for step in range(3):
            for param in params:
                param.grad = Pair(torch.full_like(param.one, step), torch.full_like(param.two, -step))
            optimizer.step()
        means = [optimizer.state[param]["momentum_buffer"] for param in params]
        assert all(type(mean) is Pair for mean in means)
        results.append([part.cpu() for pair in (*params, *means) for part in (pair.one, pair.two)])
    assert all(map(torch.equal, *results))


def test_a_trial_takes_the_memory_of_a_single_parameter(device: str, make_tiered: MakeTiered) -> None:
    """However many shapes there are."""
    module = torch.get_device_module(device)
    params = make_params(device, shapes=[(8, 8), (8, 8), *((256, 256 + number) for number in range(12))])
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    make_tiered(torch.optim.AdamW(params), bucket_bytes="4MiB")
    assert module.memory_allocated() == before
    assert module.max_memory_allocated() - before <= 6 * max(param.nbytes for param in params)


@pytest.mark.parametrize("separable", [None, True])
def test_the_trial_leaves_generators_alone(separable: bool | None, device: str, make_tiered: MakeTiered) -> None:
    generator = torch.Generator().manual_seed(5)
    optimizer = Langevin(make_params(device), generator=generator)
    before = generator.get_state()
    make_tiered(optimizer, separable=separable)
    assert torch.equal(generator.get_state(), before)
