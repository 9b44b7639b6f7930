"""tiered_mem.optim: classes with the names of torch's, whose making gives a tiered optimizer."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import tiered_mem
from tests.models import small_stack
from tests.optimizer.strange_optimizers import Noisy
from tiered_mem import TieringManager, optim
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer

OURS = ("bucket_bytes", "residency", "separable", "overlap", "keep_gradients")


def train(optimizer: torch.optim.Optimizer, model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(3):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_making_one_gives_a_tiered_optimizer_that_is_bit_equal(device: str, manager: TieringManager) -> None:
    model, x = small_stack(2, device)
    expected = train(torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1), model, x)
    model, x = small_stack(2, device)
    kind = optim.tiered(torch.optim.AdamW, manager=lambda: manager)
    optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1, bucket_bytes="1KiB", residency="host")
    assert isinstance(optimizer, TieredOptimizer)
    assert not optimizer.at_once
    assert all(map(torch.equal, train(optimizer, model, x), expected))


@pytest.mark.parametrize("name", [name for name in dir(optim) if name != "tiered"])
def test_there_is_one_for_each_of_torchs(name: str) -> None:
    """A subclass, since trainers take all else for a factory; with its arguments and ours."""
    theirs, ours = getattr(torch.optim, name), getattr(optim, name)
    assert issubclass(ours, theirs)
    assert (ours.__name__, ours.__module__) == (name, "tiered_mem.optim")
    arguments = list(inspect.signature(ours).parameters)
    assert set(inspect.signature(theirs).parameters) < set(arguments)
    assert set(OURS) < set(arguments)


def test_all_of_torchs_are_there() -> None:
    assert {"AdamW", "Adam", "SGD", "Adafactor", "Muon"} <= set(dir(optim))
    assert "Optimizer" not in dir(optim)
    with pytest.raises(AttributeError, match="no optimizer 'AdamX'"):
        tiered_mem.optim.AdamX  # noqa: B018


@pytest.mark.parametrize("kind", [object, "AdamW", optim.AdamW])
def test_what_is_no_class_of_optimizers_is_refused(kind: object) -> None:
    with pytest.raises(TypeError):
        optim.tiered(kind)


def test_the_error_of_the_optimizer_is_the_users_to_see(device: str, manager: TieringManager) -> None:
    model, _ = small_stack(1, device)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        optim.tiered(torch.optim.AdamW, manager=lambda: manager)(model.parameters(), lr=-1.0)


class Rescaling:
    """Scales the gradients to a norm of its own before each step, and chooses `lr` itself."""

    def __init__(self, params: Any, norm: float = 1e-3, **options: Any) -> None:
        super().__init__(params, lr=0.1, **options)  # type: ignore[call-arg]
        self.norm = norm

    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]  # type: ignore[attr-defined]
        torch.nn.utils.clip_grad_norm_(params, self.norm)
        return super().step(closure)  # type: ignore[misc]


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW, Noisy], ids=lambda base: base.__name__)
def test_what_is_derived_from_one_keeps_its_init_and_its_step(
    base: type[torch.optim.Optimizer], device: str, manager: TieringManager
) -> None:
    results = []
    for parent in (base, optim.tiered(base, manager=lambda: manager)):
        kind: Any = type("Rescaled", (Rescaling, parent), {})
        torch.manual_seed(0)
        model, x = small_stack(2, device)
        optimizer = kind(model.parameters(), norm=1e-2)
        results.append(train(optimizer, model, x))
    assert isinstance(optimizer, TieredOptimizer)
    assert optimizer.at_once
    assert (type(optimizer.wrapped), optimizer.wrapped.norm) == (kind, 1e-2)  # type: ignore[attr-defined]
    assert all(map(torch.equal, *results))


def test_what_is_derived_from_one_takes_the_arguments_of_registration(device: str, manager: TieringManager) -> None:
    """From its user, whose word counts most, or from its own __init__."""
    sgd: Any = optim.tiered(torch.optim.SGD, manager=lambda: manager)

    class Slow(sgd):  # type: ignore[misc]
        def __init__(self, params: Any, lr: float = 1e-4, **options: Any) -> None:
            super().__init__(params, lr=lr, separable=True, residency="device-until-offload", **options)

    class Named(Slow):
        def __init__(self, params: Any, separable: bool | None = None) -> None:
            super().__init__(params)
            self.word = separable

    def made(kind: Any, **options: Any) -> Any:
        return kind([torch.nn.Parameter(torch.ones(4, device=device))], **options)

    slow = made(Slow)
    assert (slow.at_once, slow.states.away) == (False, False)
    slow = made(Slow, separable=False, residency="host")
    assert (slow.at_once, slow.states.away) == (True, True)
    assert made(Named, separable=False).wrapped.word is False
    arguments = inspect.signature(Slow).parameters
    assert list(arguments) == ["params", "lr", *OURS, "options"]
    assert arguments["lr"].default == 1e-4


def test_of_what_is_derived_from_one_the_word_is_tried_out(device: str, manager: TieringManager) -> None:
    kind: Any = type("Rescaled", (Rescaling, optim.tiered(torch.optim.SGD, manager=lambda: manager)), {})
    model, _ = small_stack(2, device)
    with pytest.raises(ValueError, match="Rescaled needs all its parameters at once"):
        kind(model.parameters(), separable=True)
