"""Graphs that are not one forward and its backward: several in flight, used twice, abandoned, on other threads."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.conftest import EMULATED, MakeManager
from tests.models import Layer, backward, equal, eventually, gradients_of, is_empty, small_stack
from tiered_mem import TieringManager

pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.mark.parametrize("num_layers", [0, 2, None])
@pytest.mark.parametrize(
    "order", ["F0 F1 B0 F2 B2 B1", "F0 F1 F2 B1 B2 B0", "F0 F1 B1 F2 B0 B2", "F0 F1 F2 F3 B0 B1 B2 B3"]
)
def test_graphs_in_flight_in_any_order(
    device: str, make_manager: MakeManager, order: str, num_layers: int | None
) -> None:
    model, x = small_stack(3, device)
    inputs = [(x.detach() * number).requires_grad_() for number in range(1, 5)]
    expected = [backward(model(y), model, y) for y in inputs]
    offload = make_manager(num_layers).offload_context(model.layers, min_bytes=1)
    losses = {}
    for kind, number in order.split():
        if kind == "F":
            with offload:
                losses[number] = model(inputs[int(number)])
        else:
            y = inputs[int(number)]
            assert equal(backward(losses.pop(number), model, y), expected[int(number)])


class UNet(nn.Module):
    """Each layer on the way down is used again on the way up, and the first one's output at the very end too."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Layer(16) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = []
        for layer in self.down:
            x = layer(x)
            skipped.append(x)
        for layer, skip in zip(self.up, reversed(skipped), strict=True):
            x = layer(torch.cat([x, skip], dim=1)).tanh()
        return (x * skipped[0].sigmoid()).sum()


@pytest.mark.parametrize("num_layers", [1, 3, None])
def test_skip_connections(device: str, make_manager: MakeManager, num_layers: int | None) -> None:
    torch.manual_seed(0)
    model = UNet().to(device)
    x = torch.randn(32, 16).to(device).requires_grad_()
    expected = backward(model(x), model, x)
    offload = make_manager(num_layers).offload_context([*model.down, *model.up], min_bytes=1)
    for _ in range(2):
        with offload:
            loss = model(x)
        assert equal(backward(loss, model, x), expected)
        del loss


@pytest.mark.parametrize("per_layer", [False, True])
def test_second_outputs_that_are_used_at_the_end(device: str, make_manager: MakeManager, per_layer: bool) -> None:
    """Their gradients come first: backward begins with every layer at once, as it were."""

    class TwoHeaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(16)
            self.router = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layer(x), self.router(x).softmax(dim=-1).square()

    torch.manual_seed(0)
    layers = nn.ModuleList(TwoHeaded() for _ in range(4)).to(device)
    x = torch.randn(32, 16).to(device).requires_grad_()
    manager = make_manager(3)
    context: Any = manager.layer_context(4, min_bytes=1) if per_layer else None

    def forward() -> torch.Tensor:
        y, balance = x, []
        for layer in layers:
            if context is not None:
                with context:
                    y, auxiliary = layer(y)
                y = context.sync(y)
            else:
                y, auxiliary = layer(y)
            balance.append(auxiliary.sum())
        return y.pow(2).mean() + sum(balance)

    def plain() -> torch.Tensor:
        y, balance = x, []
        for layer in layers:
            y, auxiliary = layer(y)
            balance.append(auxiliary.sum())
        return y.pow(2).mean() + sum(balance)

    expected = backward(plain(), layers, x)
    offload = manager.offload_context(layers, min_bytes=1)
    for _ in range(2):
        if per_layer:
            loss = forward()
        else:
            with offload:
                loss = forward()
        assert equal(backward(loss, layers, x), expected)
        del loss


def test_abandoned_forwards_then_a_normal_step(device: str, make_manager: MakeManager) -> None:
    model, x = small_stack(3, device)
    expected = backward(model(x), model, x)
    manager = make_manager(2)
    offload = manager.offload_context(model.layers, min_bytes=1)
    for _ in range(3):
        with offload:
            loss = model(x)
        del loss
        assert is_empty(manager)
    with offload:
        loss = model(x)
    assert equal(backward(loss, model, x), expected)
    assert manager.stats()["reloads_on_demand.total"] == 0


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

    expected = backward(forward(), model, x)
    manager = make_manager(2)
    offload = manager.offload_context(model.layers, min_bytes=1)
    for _ in range(3):
        with offload:
            loss = forward()
        assert equal(backward(loss, model, x), expected)
        del loss
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


def test_exceptions_then_a_normal_step(device: str, make_manager: MakeManager) -> None:
    model, x = small_stack(3, device)
    expected = backward(model(x), model, x)
    manager = make_manager(2)
    offload = manager.offload_context(model.layers, min_bytes=1)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    for target in (model.layers[1].norm, model.layers[2].down):
        handle = target.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt), offload:
            model(x)
        handle.remove()
        assert is_empty(manager)
        handle = target.weight.register_hook(fail)
        with offload:
            loss = model(x)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        handle.remove()
        gradients_of(model, x)
        del loss
        for _ in range(2):
            with offload:
                loss = model(x)
            assert equal(backward(loss, model, x), expected)
            del loss
    assert manager.stats()["reloads_on_demand.total"] == 0


@pytest.mark.parametrize("num_layers", [1, None])
def test_a_graph_used_three_times(device: str, make_manager: MakeManager, num_layers: int | None) -> None:
    model, x = small_stack(3, device)
    expected = backward(model(x), model, x)
    with make_manager(num_layers).offload_context(model.layers, min_bytes=1):
        loss = model(x)
    for retain in (True, True, False):
        loss.backward(retain_graph=retain)
        assert equal(gradients_of(model, x), expected)


@pytest.mark.parametrize("inside", [False, True])
def test_a_gradient_penalty(device: str, make_manager: MakeManager, inside: bool) -> None:
    """The gradient of a gradient, which saves tensors of its own, outside of the context or in it."""
    model, x = small_stack(3, device)

    def penalty(loss: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.pow(2).sum()

    expected = backward(penalty(model(x)), model, x)
    offload = make_manager(2).offload_context(model.layers, min_bytes=1)
    for _ in range(2):
        if inside:
            with offload:
                loss = penalty(model(x))
        else:
            with offload:
                loss = model(x)
            loss = penalty(loss)
        assert equal(backward(loss, model, x), expected)
        del loss


def test_backward_inside_the_context(device: str, make_manager: MakeManager) -> None:
    model, x = small_stack(3, device)
    expected = backward(model(x), model, x)
    manager = make_manager()
    offload = manager.offload_context(model.layers, min_bytes=1)
    for _ in range(2):
        with offload:
            for _ in range(2):
                assert equal(backward(model(x), model, x), expected)
    assert is_empty(manager)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_move_their_inputs(
    device: str, make_manager: MakeManager, use_reentrant: bool, inside: bool
) -> None:
    """That is all there is to move: the rest is computed again. Backward may run inside the context, too."""
    model, x = small_stack(3, device)

    def forward() -> torch.Tensor:
        y = x
        for layer in model.layers:
            y = checkpoint(layer, y, use_reentrant=use_reentrant)
        return y.sum()

    expected = backward(forward(), model, x)
    manager = make_manager()
    offload = manager.offload_context(model.layers, min_bytes=1)
    for step in range(1, 4):
        with offload:
            loss = forward()
            moved = int(manager.stats()["offloaded.bytes.total"])
            if inside:
                assert equal(backward(loss, model, x), expected)
        if not inside:
            # The first layer's input is the leaf x, the others' are what the layer before gave.
            assert int(manager.stats()["offloaded.bytes.total"]) == step * 3 * x.nbytes
            assert manager.stats()["host.bytes.current"] == 3 * x.nbytes
            assert equal(backward(loss, model, x), expected)
        assert moved > 0
        del loss
    if not inside:
        assert manager.stats()["reloads_on_demand.total"] == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_some_layers_checkpointed(device: str, make_manager: MakeManager, use_reentrant: bool) -> None:
    model, x = small_stack(4, device)

    def forward() -> torch.Tensor:
        y = x
        for number, layer in enumerate(model.layers):
            y = checkpoint(layer, y, use_reentrant=use_reentrant) if number % 2 else layer(y)
        return y.sum()

    expected = backward(forward(), model, x)
    manager = make_manager(3)
    offload = manager.offload_context(model.layers, min_bytes=1)
    for _ in range(3):
        with offload:
            loss = forward()
        assert equal(backward(loss, model, x), expected)
        del loss
    assert manager.stats()["reloads_on_demand.total"] == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_context_inside_a_checkpointed_function(
    device: str, make_manager: MakeManager, use_reentrant: bool
) -> None:
    """What is saved there is thrown away and computed again in backward, in the context once more."""
    model, x = small_stack(3, device)
    manager = make_manager()
    offload = manager.offload_context(model.layers, min_bytes=1)

    def body(y: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            y = layer(y)
        return y

    def offloaded(y: torch.Tensor) -> torch.Tensor:
        with offload:
            return body(y)

    expected = backward(checkpoint(body, x, use_reentrant=use_reentrant).pow(2).mean(), model, x)
    for _ in range(2):
        loss = checkpoint(offloaded, x, use_reentrant=use_reentrant).pow(2).mean()
        assert equal(backward(loss, model, x), expected)
        del loss
    assert int(manager.stats()["offloaded.blocks.total"]) > 0


def test_two_managers_on_two_models_in_turn(device: str, make_manager: MakeManager) -> None:
    """A generator and a discriminator: the one's output is the other's input, with two managers."""
    first, x = small_stack(2, device)
    second, _ = small_stack(2, device)
    managers = make_manager(1), make_manager()
    contexts = [
        manager.offload_context(model.layers, min_bytes=1)
        for manager, model in zip(managers, (first, second), strict=True)
    ]

    def body(model: nn.Module, y: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            y = layer(y)
        return y

    expected = backward(body(second, body(first, x)).pow(2).mean(), first, second, x)
    for _ in range(2):
        with contexts[0]:
            y = body(first, x)
        with contexts[1]:
            z = body(second, y)
        with contexts[0]:
            unrelated = first(x)
        assert equal(backward(z.pow(2).mean(), first, second, x), expected)
        unrelated.backward()
        gradients_of(first, x)
        del y, z, unrelated


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Starts `work` on a thread of its own. What is returned waits for its result."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> Any:
        thread.join()
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]

    return wait


def test_backward_from_another_thread(device: str, device_module: Any, make_manager: MakeManager) -> None:
    model, x = small_stack(3, device)
    expected = backward(model(x), model, x)
    offload = make_manager(2).offload_context(model.layers, min_bytes=1)
    for _ in range(2):
        with offload:
            loss = model(x)
        assert equal(in_thread(lambda loss=loss: backward(loss, model, x))(), expected)
        del loss


@pytest.mark.parametrize("managers", [1, 2])
def test_two_threads_train_two_models(device: str, make_manager: MakeManager, managers: int) -> None:
    """Each on a stream of its own would be the sharper test of order; here the bookkeeping is what two share."""
    made = [make_manager() for _ in range(managers)]
    waits = []
    for number in range(2):
        model, x = small_stack(2, device)
        expected = backward(model(x), model, x)
        offload = made[number % managers].offload_context(model.layers, min_bytes=1)

        def train(
            model: nn.Module = model, x: torch.Tensor = x, expected: Any = expected, offload: Any = offload
        ) -> bool:
            right = True
            for _ in range(4):
                with offload:
                    loss = model(x)
                right &= equal(backward(loss, model, x), expected)
                del loss
            return right

        waits.append(in_thread(train))
    assert all(wait() for wait in waits)


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


def test_losses_that_are_kept(device: str, make_manager: MakeManager) -> None:
    """A loss that is kept for a mean at the end of the epoch keeps its graph, but no activation."""
    model, x = small_stack(2, device)
    expected = backward(model(x), model, x)
    manager = make_manager()
    offload = manager.offload_context(model.layers, min_bytes=1)
    losses = []
    for _ in range(4):
        with offload:
            losses.append(model(x))
        assert equal(backward(losses[-1], model, x), expected)
        assert is_empty(manager)
    assert len({loss.item() for loss in losses}) == 1


@pytest.mark.parametrize("first", ["manager", "graph"])
def test_a_manager_that_is_forgotten(device: str, device_module: Any, first: str) -> None:
    """Without close() and without the garbage collector: with the last of its graphs its host memory is free."""
    if EMULATED:
        limit_host("256MiB")
    model, x = small_stack(2, device)
    expected = backward(model(x), model, x)
    try:
        for _ in range(3):  # all of them together need more memory than can be pinned
            manager = TieringManager(policy="layer-order", device=device, host_bytes="100MiB")
            gone = weakref.ref(manager)
            offload = manager.offload_context(model.layers, min_bytes=1)
            with offload:
                loss = model(x)
            assert manager.stats()["host.reserved.current"] == 100 << 20
            assert manager.stats()["kept.blocks.total"] == 0
            if first == "manager":
                del manager, offload
                assert equal(backward(loss, model, x), expected)
                del loss
            else:
                assert equal(backward(loss, model, x), expected)
                del loss
                del manager, offload
            assert eventually(lambda gone=gone: gone() is None)
    finally:
        if EMULATED:
            limit_host("0")


def limit_host(size: str) -> None:
    import ascend_emulator

    ascend_emulator.configure(host_bytes=size)


def test_nothing_of_a_step_is_left(device: str, make_manager: MakeManager) -> None:
    """A forward has a hundred small objects. Once its loss is gone, none of them lives on."""
    model, x = small_stack(2, device)
    manager = make_manager(1)
    offload = manager.offload_context(model.layers, min_bytes=1)

    def step() -> None:
        with offload:
            loss = model(x)
        loss.backward()

    def ours() -> int:
        return sum(str(type(thing).__module__).startswith("tiered_mem") for thing in gc.get_objects())

    step()  # brings the first slab
    assert eventually(lambda: is_empty(manager))
    before = ours()
    for _ in range(3):
        step()
    assert eventually(lambda: is_empty(manager) and ours() <= before)
