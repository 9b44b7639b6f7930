"""Attached models: the calls of their layers count, wherever they are from, and what cannot be followed is said."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from tests.conftest import MakeManager
from tests.models import Stack, eventually, gradients_of, is_empty, stack
from tiered_mem import TieringManager
from tiered_mem.errors import Closed
from tiered_mem.policies import LayerOrderPolicy

Step = Callable[[Stack, torch.Tensor], torch.Tensor]


class Task(nn.Module):
    """A wrapper that trains the model inside. Its own forward is not called."""

    def __init__(self, model: Stack) -> None:
        super().__init__()
        self.model = model

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def by_the_model(model: Stack, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def in_eval(model: Stack, x: torch.Tensor) -> torch.Tensor:
    return model.eval()(x)


def by_its_method(model: Stack, x: torch.Tensor) -> torch.Tensor:
    return model.forward(x)


def by_its_layers(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
    return x.pow(2).mean()


def by_forwards_of_layers(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer.forward(x)
    return x.pow(2).mean()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What tiered_mem has warned of so far."""

    def messages() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.name.startswith("tiered_mem")]

    with caplog.at_level(logging.WARNING, "tiered_mem"):
        yield messages


def moved(manager: TieringManager) -> int:
    return int(manager.stats()["offloaded.bytes.total"])


def three_steps(model: Stack, step: Step, x: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(3):
        model.zero_grad()
        step(model, x).backward()
    return gradients_of(model)


def expected_of(x: torch.Tensor) -> list[torch.Tensor]:
    model, _ = stack(4, x.device.type)
    return three_steps(model, by_the_model, x)


def assert_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert any(each.numel() for each in some)
    assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("step", [in_eval, by_its_method, by_its_layers])
def test_each_way_to_the_layers_moves_as_much_as_the_model_does(
    step: Step, device: str, make_manager: MakeManager, said: Callable[[], list[str]]
) -> None:
    amounts = []
    for way in (by_the_model, step):
        model, x = stack(4, device)
        manager = make_manager()
        with manager.attach(model, min_bytes=1024):
            assert_equal(three_steps(model, way, x), expected_of(x))
        amounts.append(moved(manager))
    # Behind the last layer nothing is saved that would move. So the ways differ in nothing.
    assert amounts[0] == amounts[1] > 3 * 4 * x.nbytes
    assert said() == []


def test_a_wrapper_whose_forward_is_not_called(
    device: str, make_manager: MakeManager, said: Callable[[], list[str]]
) -> None:
    model, x = stack(4, device)
    task, manager = Task(model), make_manager()
    with manager.attach(task, min_bytes=1024):
        assert_equal(three_steps(model, lambda model, x: task.training_step(x), x), expected_of(x))
    assert moved(manager) > 3 * 4 * x.nbytes
    assert said() == []


def test_one_layer_after_the_other_with_a_backward_between(device: str, make_manager: MakeManager) -> None:
    """A loose forward ends where its backward begins, and the next layer's call begins another."""
    model, x = stack(2, device)
    manager = make_manager()
    with manager.attach(model, min_bytes=1024):
        for layer in (*model.layers, *model.layers):
            before = moved(manager)
            layer(x).sum().backward()
            assert moved(manager) > before


def test_forwards_of_layers_are_not_seen_and_that_is_said_once(
    device: str, make_manager: MakeManager, said: Callable[[], list[str]]
) -> None:
    model, x = stack(4, device)
    manager = make_manager()
    with manager.attach(model, layers=model.layers, min_bytes=1024):
        by_forwards_of_layers(model, x)
        assert said() == []
        assert_equal(three_steps(model, by_forwards_of_layers, x), expected_of(x))
    assert moved(manager) == 0
    (line,) = said()
    assert line.startswith("a backward has come to the layers of Stack, and no call of theirs was seen before")


@pytest.mark.parametrize("all_of_them", [False, True])
def test_layers_that_were_replaced(
    all_of_them: bool, device: str, make_manager: MakeManager, said: Callable[[], list[str]]
) -> None:
    model, x = stack(2, device)
    manager = make_manager()
    with manager.attach(model, min_bytes=1024):
        model.layers[0] = stack(1, device)[0].layers[0]
        if all_of_them:
            model.layers[1] = stack(1, device)[0].layers[0]
        three_steps(model, by_the_model, x)
    assert (moved(manager) == 0) == all_of_them
    assert not any("compiled" in line for line in said())
    assert ["the model has others in their place" in line for line in said()] == [True] * all_of_them


@pytest.mark.parametrize("number", [0, 2])
def test_a_manager_that_is_closed_in_a_forward(number: int, device: str) -> None:
    model, x = stack(4, device)
    plain, before = expected_of(x), dict(vars(model.layers[number]))
    manager = TieringManager(policy=LayerOrderPolicy(), device=device, host_bytes="64MiB")
    manager.attach(model, min_bytes=1024)
    mark = model.layers[number].register_forward_pre_hook(lambda module, inputs: manager.close())
    loss = model(x)
    mark.remove()
    if number:
        with pytest.raises(Closed, match="the manager was closed before this backward"):
            loss.backward()
    else:
        loss.backward()  # nothing had gone yet
    del loss
    assert vars(model.layers[number]) == before
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert_equal(three_steps(model, by_the_model, x), plain)
    assert eventually(lambda: is_empty(manager))
