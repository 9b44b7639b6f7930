"""The context that is entered once for each layer: its numbers, its schedule, and what does not disturb them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.conftest import MakeManager
from tests.models import Stack, backward, equal, is_empty, small_stack
from tiered_mem import TieringManager
from tiered_mem.policies import Action, Event, ForwardBegin, LayerBegin, LayerOrderPolicy, SynchronizationDictPolicy

LAYERS = 4

pytestmark = pytest.mark.usefixtures("no_gc")


class Listening(LayerOrderPolicy):
    """Remembers what it was told of: "F0" and "B0" for the layers, "|" where a forward begins."""

    def __init__(self, num_layers: int | None = None) -> None:
        super().__init__(num_layers)
        self.heard: list[str] = []

    def decide(self, event: Event) -> Sequence[Action]:
        if isinstance(event, ForwardBegin):
            self.heard.append("|")
        elif isinstance(event, LayerBegin):
            self.heard.append(f"{'B' if event.backward else 'F'}{event.layer}")
        return super().decide(event)

    def take(self) -> str:
        heard, self.heard = " ".join(self.heard), []
        return heard


@pytest.fixture
def policy() -> Listening:
    return Listening()


@pytest.fixture
def manager(device: str, policy: Listening) -> Iterator[TieringManager]:
    """One that tells `policy`, and in which nothing may be left."""
    with TieringManager(policy=policy, device=device, host_bytes="64MiB") as manager:
        yield manager
        assert is_empty(manager), manager.memory_summary()


def run(
    model: Stack, x: torch.Tensor, context: object, *, sync: bool = True, depth: int | None = None
) -> torch.Tensor:
    """The loss of the model's first `depth` layers, each in the context."""
    for layer in model.layers[:depth]:
        with context:
            x = layer(x)
        if sync:
            x = context.sync(x)
    return x.pow(2).mean()


def plain(model: Stack, x: torch.Tensor, depth: int | None = None) -> list[torch.Tensor]:
    y = x
    for layer in model.layers[:depth]:
        y = layer(y)
    return backward(y.pow(2).mean(), model, x)


FORWARD = "| F0 F1 F2 F3"
BACKWARD = "B3 B2 B1 B0"


@pytest.mark.parametrize("num_layers", [0, 1, 2, 3, None])
@pytest.mark.parametrize("sync", [True, False])
def test_gradients_are_bit_equal(
    device: str, make_manager: MakeManager, sync: bool, num_layers: int | None
) -> None:
    model, x = small_stack(LAYERS, device)
    expected = plain(model, x)
    manager = make_manager(num_layers)
    context = manager.layer_context(LAYERS, min_bytes=1)
    for _ in range(3):
        assert equal(backward(run(model, x, context, sync=sync), model, x), expected)
    assert manager.stats()["reloads_on_demand.total"] == 0
    assert (int(manager.stats()["offloaded.blocks.total"]) > 0) == (num_layers != 0)


@pytest.mark.parametrize("sync", [True, False])
def test_after_the_last_layer_comes_the_first(
    device: str, policy: Listening, manager: TieringManager, sync: bool
) -> None:
    model, x = small_stack(LAYERS, device)
    context = manager.layer_context(LAYERS, min_bytes=1)
    for _ in range(2):
        loss = run(model, x, context, sync=sync)
        assert policy.take() == FORWARD
        loss.backward()
        assert policy.take() == BACKWARD
    del loss


def test_sync_tells_of_a_layer_that_asks_for_nothing(
    device: str, policy: Listening, manager: TieringManager
) -> None:
    """A layer that saves no tensor has a backward all the same; the next one is told of in time by it."""
    x = torch.randn(32, 16).to(device).requires_grad_()
    context = manager.layer_context(2, min_bytes=1)
    with context:
        y = x.tanh()
    y = context.sync(y)
    with context:
        z = y + 1
    z = context.sync(z)
    policy.take()
    z.sum().backward()
    assert policy.take() == "B1 B0"


def test_a_forward_that_ends_early(device: str, policy: Listening, manager: TieringManager) -> None:
    """Its backward is over when the next forward begins, which is a whole one again."""
    model, x = small_stack(LAYERS, device)
    expected = {depth: plain(model, x, depth) for depth in (1, 3, 4)}
    context = manager.layer_context(LAYERS, min_bytes=1)
    for depth in (4, 3, 4, 1, 1, 3, 4):
        assert equal(backward(run(model, x, context, depth=depth), model, x), expected[depth])
        forward, backwards = FORWARD.split()[: depth + 1], BACKWARD.split()[LAYERS - depth :]
        assert policy.take() == " ".join(forward + backwards)
    assert manager.stats()["reloads_on_demand.total"] == 0


def test_a_forward_that_ends_early_without_backward(
    device: str, policy: Listening, manager: TieringManager
) -> None:
    model, x = small_stack(LAYERS, device)
    expected = plain(model, x)
    context = manager.layer_context(LAYERS, min_bytes=1)
    run(model, x, context, depth=2)
    assert equal(backward(run(model, x, context), model, x), expected)
    assert policy.take() == f"| F0 F1 {FORWARD} {BACKWARD}"


def test_restart_after_a_forward_whose_graph_is_kept(
    device: str, policy: Listening, manager: TieringManager
) -> None:
    model, x = small_stack(LAYERS, device)
    expected = plain(model, x), plain(model, x, 2)
    context = manager.layer_context(LAYERS, min_bytes=1)
    early = run(model, x, context, depth=2)
    context.restart()
    context.restart()
    loss = run(model, x, context)
    assert policy.take() == f"| F0 F1 {FORWARD}"
    assert equal(backward(early, model, x), expected[1])
    assert equal(backward(loss, model, x), expected[0])
    assert policy.take() == f"B1 B0 {BACKWARD}"


def test_without_gradients_nothing_is_counted(device: str, policy: Listening, manager: TieringManager) -> None:
    """Evaluation between the layers of a training step, too."""
    model, x = small_stack(LAYERS, device)
    expected = plain(model, x)
    context = manager.layer_context(LAYERS, min_bytes=1)
    with torch.no_grad():
        run(model, x, context)
        run(model, x, context, depth=2)
    y = x
    for layer in model.layers:
        with torch.no_grad():
            run(model, x, context, depth=3)
        with context:
            y = layer(y)
        with torch.inference_mode():
            context.sync(x * 1)
            run(model, x, context, depth=1)
    loss = y.pow(2).mean()
    assert policy.take() == FORWARD
    assert equal(backward(loss, model, x), expected)


def test_sync_of_what_has_no_backward(device: str, policy: Listening, manager: TieringManager) -> None:
    """A leaf, or an output without a gradient, comes back as it is, and nobody is told of it."""
    x = torch.randn(32, 16).to(device)
    leaf = x.clone().requires_grad_()
    context = manager.layer_context(1, min_bytes=1)
    with context:
        x.tanh()
    assert context.sync(x) is x
    with context:
        y = leaf.tanh()
    assert context.sync(leaf) is leaf
    with torch.no_grad():
        assert context.sync(y) is y
    policy.take()
    (leaf * 2).sum().backward()
    assert policy.take() == ""
    y.sum().backward()
    assert policy.take() == "B0"


def test_layers_that_save_nothing_count_all_the_same(
    device: str, policy: Listening, manager: TieringManager
) -> None:
    """As the frozen first layers of a model that is tuned: backward ends before it reaches them."""
    model, x = small_stack(LAYERS, device)
    model.layers[:2].requires_grad_(False)
    x = x.detach()
    y = x
    for layer in model.layers:
        y = layer(y)
    expected = backward(y.pow(2).mean(), model)
    del y
    context = manager.layer_context(LAYERS, min_bytes=1)
    for _ in range(2):
        assert equal(backward(run(model, x, context), model), expected)
        assert policy.take() == f"{FORWARD} B3 B2"


def test_a_layer_without_gradients_may_be_synced_with_them(
    device: str, policy: Listening, manager: TieringManager
) -> None:
    """A frozen part in front runs without gradients, and does not count."""
    model, x = small_stack(LAYERS, device)
    x = x.detach()
    context = manager.layer_context(LAYERS - 1, min_bytes=1)

    def forward(context: Any) -> torch.Tensor:
        with torch.no_grad(), context:
            y = model.layers[0](x)
        for layer in model.layers[1:]:
            if context is not null:
                y = context.sync(y)
            with context:
                y = layer(y)
        return y.pow(2).mean()

    null = contextlib.nullcontext()
    expected = backward(forward(null), model)
    for _ in range(2):
        assert equal(backward(forward(context), model), expected)
        assert policy.take() == "| F0 F1 F2 B2 B1 B0"


def test_sync_before_any_layer_is_refused(make_manager: MakeManager) -> None:
    context = make_manager().layer_context(2)
    with pytest.raises(RuntimeError, match="sync comes after the layer: enter the offload context first"):
        context.sync(torch.ones(1, requires_grad=True))


def test_entering_twice_is_refused_and_harmless(device: str, policy: Listening, manager: TieringManager) -> None:
    model, x = small_stack(LAYERS, device)
    expected = plain(model, x)
    context = manager.layer_context(LAYERS, min_bytes=1)
    y = x
    for layer in model.layers:
        with context:
            with pytest.raises(RuntimeError, match="entered already: leave it before the next layer"):
                context.__enter__()
            y = layer(y)
    assert equal(backward(y.pow(2).mean(), model, x), expected)
    assert policy.take() == f"{FORWARD} {BACKWARD}"


@pytest.mark.parametrize("variable_depth", [True, False])
@pytest.mark.parametrize("failing", [0, 2, 3])
def test_an_exception_inside(
    device: str, policy: Listening, manager: TieringManager, failing: int, variable_depth: bool
) -> None:
    model, x = small_stack(LAYERS, device)
    expected = plain(model, x)
    context = manager.layer_context(LAYERS, min_bytes=1, variable_depth=variable_depth)

    def fail(module: torch.nn.Module, inputs: object) -> None:
        raise KeyboardInterrupt

    handle = model.layers[failing].down.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        run(model, x, context)
    handle.remove()
    policy.take()
    assert equal(backward(run(model, x, context), model, x), expected)
    assert policy.take() == f"{FORWARD} {BACKWARD}"


def test_an_exception_in_backward(device: str, policy: Listening, manager: TieringManager) -> None:
    model, x = small_stack(LAYERS, device)
    expected = plain(model, x)
    context = manager.layer_context(LAYERS, min_bytes=1)

    def fail(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    handle = model.layers[1].up.weight.register_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        run(model, x, context).backward()
    handle.remove()
    model.zero_grad()
    x.grad = None
    policy.take()
    assert equal(backward(run(model, x, context), model, x), expected)
    assert policy.take() == f"{FORWARD} {BACKWARD}"


@pytest.mark.parametrize("variable_depth", [True, False])
def test_a_backward_between_the_layers(device: str, make_manager: MakeManager, variable_depth: bool) -> None:
    """In a pipeline, F0 B0 F1 B1 is one forward of two layers; otherwise it is two that ended early."""
    model, x = small_stack(1, device)
    expected = plain(model, x)
    policy = Listening()
    with TieringManager(policy=policy, device=device, host_bytes="64MiB") as manager:
        context = manager.layer_context(2, min_bytes=1, variable_depth=variable_depth)
        for _ in range(2):
            for _ in range(2):
                assert equal(backward(run(model, x, context), model, x), expected)
        one_each = "| F0 B0 | F0 B0 | F0 B0 | F0 B0"
        assert policy.take() == (one_each if variable_depth else "| F0 B0 F1 B1 | F0 B0 F1 B1")
        assert is_empty(manager)


def test_microbatches_in_a_pipeline(device: str) -> None:
    """Two microbatches of two layers: four numbers, with the backward of the first before that of the second."""
    model, x = small_stack(2, device)
    expected = plain(model, x)
    order = ["F0", "F1", "F2", "F3", "B1", "B0", "B3", "B2"]
    schedule = {0: (True, 2, False, 1), 2: (False, 1, False, 3)}
    policy = SynchronizationDictPolicy(schedule, order=order)
    with TieringManager(policy=policy, device=device, host_bytes="64MiB") as manager:
        context = manager.layer_context(4, min_bytes=1, variable_depth=False)
        for _ in range(3):
            losses = [run(model, x, context) for _ in range(2)]
            for loss in losses:
                assert equal(backward(loss, model, x), expected)
        del loss, losses
        assert manager.stats()["reloads_on_demand.total"] == 0
        assert int(manager.stats()["released.blocks.total"]) > 0
        assert is_empty(manager)


def test_two_contexts_of_one_manager_in_turn(device: str, policy: Listening, manager: TieringManager) -> None:
    """An encoder and a decoder, each with numbers of its own."""
    model, x = small_stack(2, device)
    first, second = (manager.layer_context(2, min_bytes=1) for _ in range(2))

    def forward(*contexts: object) -> torch.Tensor:
        y = x
        for layer in model.layers:
            for context in contexts:
                with context:
                    y = layer(y)
                y = context.sync(y)
        return y.pow(2).mean()

    y = x
    for layer in model.layers:
        y = layer(layer(y))
    expected = backward(y.pow(2).mean(), model, x)
    del y
    for _ in range(2):
        assert equal(backward(forward(first, second), model, x), expected)
        assert policy.take() == "| F0 | F0 F1 F1 B1 B1 B0 B0"


def test_too_few_layers_for_the_policy(device: str) -> None:
    with (
        TieringManager(policy=LayerOrderPolicy(3), device=device, host_bytes="1MiB") as manager,
        pytest.raises(ValueError, match=r"offloads more layers than the model has \(2\)"),
    ):
        manager.layer_context(2)


def test_the_context_as_a_decorator_of_a_layer(device: str, policy: Listening, manager: TieringManager) -> None:
    model, x = small_stack(LAYERS, device)
    expected = plain(model, x)
    context = manager.layer_context(LAYERS, min_bytes=1)

    @context
    def call(layer: torch.nn.Module, y: torch.Tensor) -> torch.Tensor:
        return layer(y)

    for _ in range(2):
        y = x
        for layer in model.layers:
            y = context.sync(call(layer, y))
        assert equal(backward(y.pow(2).mean(), model, x), expected)
        assert policy.take() == f"{FORWARD} {BACKWARD}"
        del y
