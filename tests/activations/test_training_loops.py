"""What training loops do around a step: teachers, evaluation, autocast, scaled and accumulated gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import MakeManager
from tests.models import assert_same, backward, equal, gradients_of, is_empty, small_stack
from tests.spilling import keys
from tiered_mem import TieringManager
from tiered_mem.policies import ManualPolicy, Offload, Release, Reload

pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_a_teacher_inside_the_context(device: str, make_manager: MakeManager, quiet: Callable[[], Any]) -> None:
    """The same layers run without gradients, in between and even inside the training forward."""
    model, x = small_stack(3, device)

    def forward() -> torch.Tensor:
        with quiet():
            model(x)
        y = model.layers[0](x)
        with quiet():
            target = model.layers[2](model.layers[1](y)).clone()
        y = model.layers[2](model.layers[1](y))
        return (y - target.clone().detach() * 0.5).pow(2).mean()

    manager = make_manager(2)
    offload = manager.offload_context(model.layers, min_bytes=1)
    assert_same(forward, offload, model, x)
    assert manager.stats()["reloads_on_demand.total"] == 0


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_evaluation_in_the_context_then_a_normal_step(
    device: str, make_manager: MakeManager, quiet: Callable[[], Any]
) -> None:
    model, x = small_stack(3, device)
    expected = backward(model(x), model, x)
    manager = make_manager()
    offload = manager.offload_context(model.layers, min_bytes=1)
    for step in range(2):
        with quiet(), offload:
            model(x)
        with offload, quiet():
            model(x)
        if step == 0:
            assert manager.stats()["offloaded.blocks.total"] == 0
        with offload:
            loss = model(x)
        assert equal(backward(loss, model, x), expected)
        del loss


@pytest.mark.parametrize("inside", [Offload, Reload])
def test_blocks_move_in_inference_mode(device: str, inside: type[Offload | Reload]) -> None:
    """As where a model is evaluated while a graph waits for its backward, which is outside of the mode."""
    model, x = small_stack(3, device)
    expected = backward(model(x), model, x)
    with TieringManager(policy=ManualPolicy(), device=device, host_bytes="1MiB", preallocate=False) as manager:
        offload = manager.offload_context(model.layers, min_bytes=1)
        for step in range(2):
            with offload:
                loss = model(x)
            for kind in (Offload, Release, Reload):
                with torch.inference_mode(kind is inside and step == 0):
                    manager.act(kind(key) for key in keys(manager))
            assert equal(backward(loss, model, x), expected)
            del loss
        assert is_empty(manager)


def test_a_tensor_of_inference_mode_is_refused_as_autograd_refuses_it(
    device: str, make_manager: MakeManager
) -> None:
    weight = torch.randn(16, 16).to(device).requires_grad_()
    with torch.inference_mode():
        x = torch.randn(32, 16).to(device)
    layer = nn.Identity()
    with (
        pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"),
        make_manager().offload_context([layer], min_bytes=1),
    ):
        layer(x) @ weight


def test_autocast_of_low_precision_weights_moves_no_weight(device: str, make_manager: MakeManager) -> None:
    model, x = small_stack(2, device)

    def forward() -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return model(x)

    moved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    expected = backward(loss, model, x)
    del loss
    # Activations have 32 rows here, and weights and their copies never have.
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in moved if 32 in t.shape[:1]}
    manager = make_manager()
    offload = manager.offload_context(model.layers, min_bytes=1)
    for step in range(1, 3):
        with offload:
            loss = forward()
        of_loss = x.nbytes  # what comes out of the last layer is saved outside of the layers
        assert manager.stats()["offloaded.bytes.total"] == step * (sum(storages.values()) - of_loss)
        assert equal(backward(loss, model, x), expected)
        del loss


def test_a_gradient_scaler_that_skips_a_step(device: str, make_manager: MakeManager) -> None:
    def train(offload: Any) -> list[torch.Tensor]:
        model, x = small_stack(2, device)
        context = offload(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
        seen = []
        for factor in (1.0, float("inf"), 2.0):
            optimizer.zero_grad()
            with context, torch.autocast(device, dtype=torch.bfloat16):
                loss = model(x) * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen += [p.detach().cpu().clone() for p in model.parameters()] + [torch.tensor(scaler.get_scale())]
            del loss
        return seen

    expected = train(lambda model: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
    manager = make_manager()
    got = train(lambda model: manager.offload_context(model.layers, min_bytes=1))
    assert equal(got, expected)
    scales = [t.item() for t in got if t.dim() == 0]
    assert scales[1] < scales[0], "the second step was not skipped"


@pytest.mark.parametrize("at_once", [False, True])
def test_gradient_accumulation(device: str, make_manager: MakeManager, at_once: bool) -> None:
    """Four microbatches, each with its own backward or all with one."""
    model, x = small_stack(2, device)
    batches = [(x.detach() + number).requires_grad_() for number in range(4)]

    def step(context: Any) -> list[torch.Tensor]:
        losses = []
        for batch in batches:
            with context:
                losses.append(model(batch) / 4)
            if not at_once:
                losses.pop().backward()
        if at_once:
            torch.stack(losses).sum().backward()
        return gradients_of(model, *batches)

    expected = step(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
    manager = make_manager(1)
    offload = manager.offload_context(model.layers, min_bytes=1)
    for _ in range(2):
        assert equal(step(offload), expected)


def test_a_model_that_moves_between_steps(device: str, make_manager: MakeManager) -> None:
    """To another dtype, to the CPU and back: its new weights are known, and what is on the CPU stays there."""
    model, x = small_stack(2, device)
    x = x.detach()
    manager = make_manager()
    offload = manager.offload_context(model.layers, min_bytes=1)
    moved = {}
    for kind, dtype in ((device, torch.float32), (device, torch.bfloat16), ("cpu", torch.float32), (device, None)):
        dtype = dtype or torch.float32
        model.to(device=kind, dtype=dtype)
        y = x.clone().to(device=kind, dtype=dtype).requires_grad_()
        expected = backward(model(y), model, y)
        for _ in range(2):
            before = int(manager.stats()["offloaded.bytes.total"])
            with offload:
                loss = model(y)
            step = int(manager.stats()["offloaded.bytes.total"]) - before
            assert equal(backward(loss, model, y), expected)
            del loss
            assert moved.setdefault((kind, dtype), step) == step
    assert moved["cpu", torch.float32] == 0
    assert moved[device, torch.bfloat16] * 2 == pytest.approx(moved[device, torch.float32], rel=0.05)
