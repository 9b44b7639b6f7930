"""What happens where a context cannot be entered, or is not the only one that uses the layers."""

from __future__ import annotations

import copy
import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from tests.models import Stack, assert_same, eventually, is_empty, small_stack
from tiered_mem import TieringManager
from tiered_mem.policies import (
    Action,
    Event,
    ForwardBegin,
    ForwardEnd,
    LayerBegin,
    LayerEnd,
    LayerOrderPolicy,
    Saved,
)
from tiered_mem.tiers.host_tier import flat_form

Entering = Callable[[TieringManager, Stack], AbstractContextManager[object]]


def by_layers(manager: TieringManager, model: Stack) -> AbstractContextManager[object]:
    return manager.offload_context(model.layers, min_bytes=1)


def layer_by_layer(manager: TieringManager, model: Stack) -> AbstractContextManager[object]:
    return manager.layer_context(1, min_bytes=1)


CONTEXTS = pytest.mark.parametrize("entering", [by_layers, layer_by_layer])


def run(model: Stack, context: AbstractContextManager[object], x: torch.Tensor) -> list[torch.Tensor]:
    """A step of which the forward is in the context."""
    with context:
        loss = model(x)
    loss.backward()
    gradients = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    x.grad = None
    return gradients


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@CONTEXTS
def test_a_context_can_be_entered_after_saved_tensor_hooks_were_not_allowed(
    entering: Entering, manager: TieringManager, device: str
) -> None:
    model, x = small_stack(2, device)
    expected = run(model, nullcontext(), x)
    context = entering(manager, model)
    for _ in range(3):
        with torch.autograd.graph.disable_saved_tensors_hooks("off"), pytest.raises(RuntimeError, match="off"):
            context.__enter__()
    assert hooks(model) == 0
    assert all(map(torch.equal, run(model, context, x), expected))


class Raises(LayerOrderPolicy):
    """A policy that raises when it is told of one kind of event, as long as `when` says so."""

    def __init__(self, when: type[object]) -> None:
        super().__init__()
        self.when: type[object] | None = when

    def decide(self, event: Event) -> list[Action]:
        if self.when is not None and isinstance(event, self.when):
            raise OSError("the policy failed")
        return list(super().decide(event))


@CONTEXTS
@pytest.mark.parametrize("when", [ForwardBegin, LayerBegin, Saved, LayerEnd, ForwardEnd])
def test_a_context_can_be_entered_after_the_policy_raised(
    entering: Entering, when: type[object], device: str, no_gc: None
) -> None:
    policy = Raises(when)
    model, x = small_stack(2, device)
    expected = run(model, nullcontext(), x)
    with TieringManager(policy=policy, device=device, host_bytes="8MiB") as manager:
        context = entering(manager, model)
        for _ in range(3):
            with pytest.raises(OSError, match="the policy failed"):
                run(model, context, x)
            assert hooks(model) == 0
            assert eventually(lambda: is_empty(manager))
        policy.when = None
        assert all(map(torch.equal, run(model, context, x), expected))


class Mixes(nn.Module):
    """A layer that is called with something beside its input."""

    def __init__(self, mix: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.mix = mix

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.mix(other, self.linear(x)))


def coordinates(device: str) -> torch.Tensor:
    indices = torch.arange(32).repeat(2, 1)
    return torch.sparse_coo_tensor(indices, torch.ones(32), check_invariants=False).to(device)


def csr(device: str) -> torch.Tensor:
    places = torch.arange(33)
    return torch.sparse_csr_tensor(places, places[:32], torch.ones(32), check_invariants=False)


def nested(device: str) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)])


def quantized(device: str) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(32, 32), 0.1, 0, torch.qint8)


STRANGE: dict[str, tuple[Callable[[str], torch.Tensor], Callable[..., torch.Tensor]]] = {
    "sparse": (coordinates, torch.sparse.mm),
    "csr": (csr, torch.matmul),
    "mkldnn": (lambda device: torch.randn(32, 32).to_mkldnn(), lambda other, x: x + other.to_dense()),
    "nested": (nested, lambda other, x: x * other.size(0)),
    "quantized": (quantized, lambda other, x: x + other.dequantize()),
    "meta": (lambda device: torch.empty(3, device="meta"), lambda other, x: x * other.shape[0]),
}


@pytest.mark.filterwarnings("ignore:.*(nested tensors|quantize|Sparse CSR|deprecated).*")
@pytest.mark.parametrize("kind", STRANGE)
def test_a_layer_may_be_called_with_any_tensor(kind: str, device: str) -> None:
    make, mix = STRANGE[kind]
    place = device if kind == "meta" else "cpu"  # torch_npu has no operator for the others
    torch.manual_seed(0)
    other = make(place)
    layers = nn.ModuleList(Mixes(mix) for _ in range(2)).to(place)
    x = torch.randn(32, 32).to(place).requires_grad_()

    def forward() -> torch.Tensor:
        y = layers[0](x, other)
        return layers[1](y, other=other).sum()

    with TieringManager(policy=LayerOrderPolicy(), device=place, host_bytes="8MiB") as manager:
        assert_same(forward, manager.offload_context(layers, min_bytes=1), layers, x)
        assert int(manager.stats()["offloaded.blocks.total"]) > 0


def test_a_layer_may_have_a_sparse_buffer(manager: TieringManager, device: str) -> None:
    layer = nn.Linear(32, 32).to(device)
    layer.register_buffer("adjacency", coordinates(device))
    x = torch.randn(32, 32).to(device).requires_grad_()
    layers = nn.ModuleList([layer])
    assert_same(lambda: layer(x).sigmoid().sum(), manager.offload_context(layers, min_bytes=1), layers, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("transform", ["vmap", "jvp"])
def test_layers_may_be_transformed(transform: str) -> None:
    """By what torch.func makes of a function, as far as that allows for saved tensors."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
    x = torch.randn(4, 8, requires_grad=True)

    def through(y: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            y = layer(y)
        return y

    def forward() -> torch.Tensor:
        if transform == "vmap":
            return torch.func.vmap(through)(x).sum()
        return sum(torch.func.jvp(through, (x,), (torch.ones_like(x),))).sum()

    with TieringManager(policy=LayerOrderPolicy(), device="cpu", host_bytes="8MiB") as manager:
        assert_same(forward, manager.offload_context(layers, min_bytes=1), layers, x)


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_a_thread_that_did_not_enter_is_not_concerned(
    make_manager: Callable[..., TieringManager], device: str, restless: None
) -> None:
    """Its calls are no layers of the other thread's forward, and it saves what it likes."""
    model, x = small_stack(4, device)
    manager = make_manager()
    context = manager.offload_context(model.layers, min_bytes=1)
    expected = run(model, nullcontext(), x)
    failures: list[BaseException] = []
    stop = threading.Event()
    apart, y = small_stack(4, device)  # a gradient of its own: two backwards at once would add to the same one

    def evaluate() -> None:
        try:
            while not stop.is_set():
                with torch.no_grad():
                    model(x).item()  # or the device would have ever more to do
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        for _ in range(5):
            assert all(map(torch.equal, run(model, context, x), expected))
            assert context._expected == 4
    finally:
        stop.set()
        thread.join()
    assert failures == []
    assert hooks(model) == 0
    assert all(map(torch.equal, run(apart, manager.offload_context(apart.layers, min_bytes=1), y), expected))


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, nn.Module)
    return loaded


@pytest.mark.parametrize("again", [copied, saved, partial(copy.copy)], ids=["deepcopy", "save", "copy"])
def test_a_model_can_be_copied_inside_and_the_copy_has_no_hook(
    again: Callable[[nn.Module], nn.Module], manager: TieringManager, device: str
) -> None:
    model, x = small_stack(2, device)
    model.layers[0].register_forward_hook(_OfTheUser())
    expected = run(model, nullcontext(), x)
    context, other = (manager.offload_context(model.layers, min_bytes=1) for _ in range(2))
    with context, other:
        twin = again(model)
        if again in (copied, saved):
            assert hooks(twin) == 1  # the user's own
        layer = again(model.layers[0])
        assert hooks(layer) == 1
        assert "__reduce_ex__" not in vars(layer)
    assert hooks(model) == 1
    assert not any("__reduce_ex__" in vars(each) for each in model.layers)
    assert isinstance(twin, Stack)
    assert all(map(torch.equal, run(twin, manager.offload_context(twin.layers, min_bytes=1), x), expected))


class _OfTheUser:
    """A hook of the user's, which a copy has too."""

    def __call__(self, *inputs: object) -> None:
        """It only has to be there."""


def test_an_error_of_the_step_is_not_hidden_by_one_of_closing(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = TieringManager(policy="lru", device=device, host_bytes="1MiB")
    slots = manager._host.reserve([flat_form(1)])

    def train() -> None:
        with manager:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), caplog.at_level(logging.ERROR, "tiered_mem"):
        train()
    assert "still allocated" in caplog.text
    manager._host.release(slots[0], None)
    manager.close()
