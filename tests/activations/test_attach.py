"""Attached models: each forward with gradients on is offloaded by itself."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import threading
import weakref

import pytest
import torch
from torch import nn

from tests.conftest import MakeManager
from tests.models import Stack, stack
from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy


def moved(manager: TieringManager) -> int:
    return int(manager.stats()["offloaded.bytes.total"])


def gradients(model: Stack, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert some
    assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_an_attached_model_trains_as_before_and_moves(device: str, make_manager: MakeManager) -> None:
    model, x = stack(4, device)
    plain = gradients(model, x)
    manager = make_manager()
    attachment = manager.attach(model, min_bytes=1024)
    for _ in range(3):
        assert_equal(gradients(model, x), plain)
    assert moved(manager) > 3 * 4 * x.nbytes
    attachment.remove()


def test_only_what_has_gradients_is_offloaded(device: str, make_manager: MakeManager) -> None:
    model, x = stack(4, device)
    manager = make_manager()
    with manager.attach(model, min_bytes=1024):
        with torch.no_grad():
            model(x)
        assert moved(manager) == 0
        model(x).backward()
        assert moved(manager) > 0


def test_a_removed_attachment_leaves_nothing(device: str, make_manager: MakeManager) -> None:
    model, x = stack(4, device)
    before = dict(vars(model))
    manager = make_manager()
    attachment = manager.attach(model, min_bytes=1024)
    saved = model(x)
    attachment.remove()
    attachment.remove()
    assert vars(model) == before
    saved.backward()  # what it saved while it was attached comes back
    once = moved(manager)
    model(x).backward()
    assert moved(manager) == once > 0
    manager.attach(model).remove()


def test_neither_the_handle_nor_the_manager_keeps_the_model(
    device: str, make_manager: MakeManager, no_gc: None
) -> None:
    model, x = stack(4, device)
    manager = make_manager()
    attachment = manager.attach(model, min_bytes=1024)
    model(x).backward()
    gone = weakref.ref(model)
    del model
    assert gone() is None
    attachment.remove()


def test_a_copy_is_not_attached(device: str, make_manager: MakeManager) -> None:
    model, x = stack(4, device)
    manager = make_manager()
    with manager.attach(model, min_bytes=1024):
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for other in (twin, loaded):
            assert "forward" not in vars(other)
            assert_equal(gradients(other, x), gradients(model, x))


def test_forward_signature_and_type_are_the_models(device: str, make_manager: MakeManager) -> None:
    model, _ = stack(2, device)
    before = type(model), model.forward, inspect.signature(model.forward), set(dir(type(model)))
    with make_manager().attach(model):
        assert (type(model), model.forward, inspect.signature(model.forward), set(dir(type(model)))) == before
        assert "forward" not in vars(model)


def test_a_forward_that_somebody_has_replaced_comes_back(device: str, make_manager: MakeManager) -> None:
    model, x = stack(2, device)
    method = type(model).forward

    def twice(x: torch.Tensor) -> torch.Tensor:
        return method(model, x) * 2

    model.forward = twice  # type: ignore[method-assign]
    plain = gradients(model, x)
    manager = make_manager()
    with manager.attach(model, min_bytes=1024):
        assert_equal(gradients(model, x), plain)
        assert moved(manager) > 0
        assert copy.deepcopy(model).forward is twice
    assert model.forward is twice
    del model.forward
    gc.collect()


def test_a_wrapper_around_it_goes_on_without_it(device: str, make_manager: MakeManager) -> None:
    model, x = stack(2, device)
    manager = make_manager()
    attachment = manager.attach(model, min_bytes=1024)
    inner = model.forward

    def wrapper(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * 1

    model.forward = wrapper  # type: ignore[method-assign]
    attachment.remove()
    model(x).backward()
    assert moved(manager) == 0
    del model.forward


def test_a_second_attachment_is_refused(device: str, make_manager: MakeManager) -> None:
    model, _ = stack(2, device)
    with (
        make_manager().attach(model),
        pytest.raises(ValueError, match=r"Stack is attached already: remove\(\) that"),
    ):
        make_manager().attach(model)


def test_arguments_are_checked_when_it_is_attached(device: str) -> None:
    model, _ = stack(2, device)
    with TieringManager(policy=LayerOrderPolicy(3), device=device, host_bytes="8MiB") as manager:
        with pytest.raises(ValueError, match="more layers than the model has"):
            manager.attach(model)
        with pytest.raises(ValueError, match="layers of Linear are unknown"):
            manager.attach(nn.Linear(2, 2))
    assert "forward" not in vars(model)


def test_a_closed_manager_lets_the_model_run(device: str) -> None:
    model, x = stack(2, device)
    plain = gradients(model, x)
    with TieringManager(policy=LayerOrderPolicy(), device=device, host_bytes="8MiB") as manager:
        manager.attach(model, min_bytes=1024)
        assert_equal(gradients(model, x), plain)
    assert_equal(gradients(model, x), plain)


def test_an_interrupted_forward_leaves_no_hooks(device: str, make_manager: MakeManager) -> None:
    model, x = stack(2, device)
    manager = make_manager()

    def interrupt(module: nn.Module, inputs: object) -> None:
        raise KeyboardInterrupt

    with manager.attach(model, min_bytes=1024):
        mark = model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        mark.remove()
        before = moved(manager)
        (x.requires_grad_() * 2).sin().sum().backward()
        assert moved(manager) == before
        model(x).backward()
        assert moved(manager) > before


def test_two_threads_train_one_model(device: str, make_manager: MakeManager) -> None:
    model, x = stack(4, device)
    plain = gradients(model, x)
    manager = make_manager()
    results: dict[int, list[torch.Tensor]] = {}
    both = threading.Barrier(2, timeout=60)

    def meet(module: nn.Module, inputs: object) -> None:
        both.wait()

    model.layers[0].register_forward_pre_hook(meet)

    def run(number: int) -> None:
        loss = model(x)
        results[number] = list(torch.autograd.grad(loss, list(model.parameters())))

    with manager.attach(model, min_bytes=1024):
        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number in range(2):
        assert_equal(results[number], plain)
    assert moved(manager) > 2 * 4 * x.nbytes


class Staged(nn.Module):
    """A stem, blocks, something between them, and a head: all save tensors that are large."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).sin()
        for block in self.blocks:
            x = block(x).exp().sin()
        return self.head(x).sum()


def test_what_is_saved_before_a_layer_moves_with_it(device: str, make_manager: MakeManager) -> None:
    torch.manual_seed(0)
    model, x = Staged().to(device), torch.randn(256, 64, device=device)
    named, attached = make_manager(), make_manager()
    with named.offload_context(model.blocks, min_bytes=1024):
        loss = model(x)
    loss.backward()
    with attached.attach(model, min_bytes=1024):
        model(x).backward()
    # The stem keeps x, sin what it gets, and exp what it gives, as the sin behind it does.
    assert moved(attached) - moved(named) == 3 * x.nbytes
    stayed = attached.stats()
    assert stayed["stayed.outside.bytes.total"] == 3 * x.nbytes  # of those two behind the last block, and the head
