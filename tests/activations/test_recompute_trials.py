"""Layers that would come to other numbers the second time are found, and keep what they save."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import distributed, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from emulator.tests.launch import run
from tests.activations.recomputing import HOWS, LAYERS, STEPS, Of, gradients, plain, same, saved_bytes, tiering
from tests.conftest import EMULATED
from tests.models import Layer, Stack, eventually, stack
from tiered_mem import NotRepeatable
from tiered_mem.activations.recompute import same_bits


class Normed(nn.Module):
    """Batch norm changes its buffers in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x)).tanh()


class Statistics(nn.Module):
    """Changes buffers by an operator that counts no versions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("variance", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(self.inner(x), self.mean, self.variance, training=True).tanh()


class InPlace(nn.Module):
    """Changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x * 2)
        with torch.no_grad():
            x += 1
        return y.sin() + 1


class Decays(nn.Module):
    """Changes its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.inner.weight.mul_(0.5)
        return self.inner(x.sin()).tanh()


class OwnGenerator(nn.Module):
    """Drops by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(x.shape, generator=self.generator).to(x.device) > 0.3
        return self.inner(x * kept).tanh()


class Pythons(nn.Module):
    """Scales by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * random.random()).tanh()


class Numpys(nn.Module):
    """Scales by numpy's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * float(numpy.random.random())).tanh()


class Checkpoints(nn.Module):
    """Has a checkpoint of its own."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x.sin(), use_reentrant=self.reentrant)


class Reentrant(Checkpoints):
    reentrant = True


EXCLUDED = {
    Normed: "changes its buffer norm.",
    Statistics: "changes its buffer mean",
    InPlace: "changes its input",
    OwnGenerator: "draws from a generator of its own",
    Pythons: "random numbers of Python",
    Numpys: "random numbers of Python or numpy",
    Decays: "changes its weight inner.weight",
    Checkpoints: "a checkpoint of its own",
    Reentrant: "a checkpoint of its own",
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", EXCLUDED)
@pytest.mark.parametrize("allowed", ["auto", "allow"])
def test_who_would_give_other_numbers_keeps_all(
    allowed: str, kind: type[nn.Module], how: Any, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With "allow" no trial compares values, which would find most of them as well."""
    x = torch.randn(8, 64).to(device)

    def trained(tiered: bool) -> list[Any]:
        """Gradients of each step, and the buffers after the last."""
        random.seed(0)
        numpy.random.seed(0)
        model = Of(kind).to(device)
        found = []
        with tiering(device, recompute=allowed) as manager:
            context = manager.offload_context(model.layers, min_bytes=1, recompute=how)
            for _ in range(3):
                step = gradients(model, x.clone(), lambda: context if tiered else torch.enable_grad())
                found += [each.clone() for each in step]
        return found + list(model.buffers())

    right = trained(tiered=False)
    with caplog.at_level(logging.WARNING, "tiered_mem.activations"):
        assert same(trained(tiered=True), right)
    told = [each.getMessage() for each in caplog.records if "not computed again" in each.getMessage()]
    assert len(told) == 1
    assert kind.__name__ in told[0]
    assert EXCLUDED[kind] in told[0]


@pytest.mark.parametrize("how", ["cheap", "full"])
def test_layers_inside_of_checkpoints_stay_as_they_are_which_one_line_says(
    how: Any, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()).to(device) for _ in range(3)]
    x = torch.randn(4, 16).to(device)
    with tiering(device) as manager, caplog.at_level(logging.WARNING, "tiered_mem.activations"):
        for _ in range(2):
            with manager.offload_context(layers, min_bytes=1, recompute=how):
                y = x.requires_grad_()
                for layer in layers:
                    y = checkpoint(layer, y, use_reentrant=False)
            y.sum().backward()
    told = [each.getMessage() for each in caplog.records if "inside of a checkpoint" in each.getMessage()]
    assert len(told) == 1
    assert "Sequential runs inside of a checkpoint" in told[0]
    assert "gradient_checkpointing=False" in told[0]


def test_collectives_are_not_issued_again(caplog: pytest.LogCaptureFixture) -> None:
    """Of one process. Others may not come to issue theirs a second time."""

    class Gathers(Layer):
        issued = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Gathers.issued += 1
            y = super().forward(x).detach().clone()
            distributed.all_reduce(y)
            return super().forward(x) * y

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = Of(lambda: Gathers(64))
        x = torch.randn(8, 64)
        right = plain(model, x)
        with tiering("cpu") as manager:
            context = manager.offload_context(model.layers, min_bytes=1, recompute="full")
            assert same(gradients(model, x, lambda: context), right)
        assert Gathers.issued == 2 * LAYERS
    finally:
        distributed.destroy_process_group()
    assert "it issues a collective itself, c10d::allreduce_" in caplog.text


class Counts(nn.Module):
    """Does something else at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.numbers = itertools.count(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * next(self.numbers)).sin()


def test_values_that_do_not_come_again_end_the_first_backward(device: str) -> None:
    """Only the first layer kept all: the others had counted on its outcome. From then on all do."""
    model = Of(Counts).to(device)
    x = torch.randn(8, 64).to(device)
    with tiering(device) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute="full")
        with pytest.raises(NotRepeatable, match="Counts cannot be computed again"):
            gradients(model, x, lambda: context)
        x.requires_grad_()
        everything = LAYERS * 2 * x.nbytes
        assert eventually(lambda: saved_bytes(manager, model, x, context) == everything)


def test_a_single_layer_that_does_not_come_again_costs_nothing(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(8, 64).to(device)
    right = plain(Of(Counts, 1).to(device), x)
    model = Of(Counts, 1).to(device)
    with tiering(device) as manager:
        found = gradients(model, x, lambda: manager.offload_context(model.layers, min_bytes=1, recompute="full"))
    assert same(found, right)
    assert "has other values the second time" in caplog.text


def test_allowed_to_differ(device: str) -> None:
    model = Of(Counts).to(device)
    x = torch.randn(8, 64).to(device)
    with tiering(device, recompute="allow") as manager:
        for _ in range(STEPS):
            gradients(model, x, lambda: manager.offload_context(model.layers, min_bytes=1, recompute="full"))


def test_a_layer_that_begins_to_change_its_buffer_is_found(device: str) -> None:
    class Late(Layer):
        calls = 0

        def __init__(self) -> None:
            super().__init__(64)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Late.calls += 1
            if Late.calls > 40:
                self.seen += 1
            return super().forward(x)

    model = Of(Late).to(device)
    x = torch.randn(8, 64).to(device)
    with tiering(device) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute="full")
        for _ in range(40 // LAYERS // 2):
            gradients(model, x, lambda: context)
        with pytest.raises(NotRepeatable, match="changes its buffer seen"):
            gradients(model, x, lambda: context)


def test_other_shapes_have_trials_of_their_own(device: str) -> None:
    model, x = stack(LAYERS, device)
    with tiering(device) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute="full")
        for rows in (16, 8, 16, 8, 4):
            part = x[:rows].contiguous()
            assert same(gradients(model, part, lambda: context), plain(model, part))
        kinds = manager._contexts._recomputer._kinds.values()
        assert [len(each.equal) for each in kinds] == [2, 2, 1]


def test_kinds_are_not_kept_for_ever(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_mem.activations.recompute._MOST_KINDS", 3)
    model = Stack(1, 16).to(device)
    with tiering(device) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute="full")
        for rows in range(1, 9):
            gradients(model, torch.randn(rows, 16).to(device), lambda: context)
        assert len(manager._contexts._recomputer._kinds) == 3


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.5, float("nan")]),
        torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        torch.tensor([1, 2], dtype=torch.complex64),
        torch.tensor([1, 2], dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t(),
    ],
    ids=str,
)
def test_bits_are_compared(tensor: torch.Tensor) -> None:
    assert same_bits(tensor, tensor.clone())
    assert not same_bits(tensor, tensor[:1])
    assert not same_bits(tensor[:1], tensor[1:])


def test_bits_of_tensors_that_lie_otherwise_in_memory_are_compared() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    assert same_bits(matrix.t(), matrix.t().contiguous())
    assert same_bits(matrix.t().contiguous(), matrix.t())
    assert not same_bits(matrix.t(), torch.arange(6.0).reshape(3, 2))
    assert same_bits(matrix[:0], matrix[:0].clone())


def test_the_last_of_very_many_bits_are_compared_too() -> None:
    zeros = torch.zeros((1 << 24) + 1, dtype=torch.bool)
    ones = zeros.clone()
    assert same_bits(zeros, ones)
    ones[-1] = True
    assert not same_bits(zeros, ones)


def test_zeros_of_two_signs_are_not_the_same() -> None:
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def at_last_keeps_all(model: nn.Module, x: torch.Tensor, how: Any, why: str, between: Callable[[], object]) -> None:
    """Something happens between a forward and its backward: that step is refused, and the next is the plain one."""
    with tiering(x.device.type) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute=how)

        def step(happens: bool, around: AbstractContextManager[Any]) -> list[Any]:
            model.zero_grad()
            y = x.detach().requires_grad_()
            torch.manual_seed(1)
            with around:
                loss = model(y)
            if happens:
                between()
            loss.backward()
            return [y.grad, *(weight.grad for weight in model.parameters())]

        for _ in range(STEPS):
            step(False, context)
        state = {name: each.clone() for name, each in model.state_dict().items()}
        with pytest.raises(NotRepeatable, match=why):
            step(True, context)
        model.train()
        model.load_state_dict(state)
        found = [each.clone() for each in step(True, context)]
        model.train()
        model.load_state_dict(state)
        assert same(found, step(True, torch.enable_grad()))


@pytest.mark.parametrize("how", HOWS)
def test_a_weight_that_changes_before_backward(how: Any, device: str) -> None:
    """Autograd does not need a bias again, but what is computed again would."""
    model, x = stack(LAYERS, device)

    def change() -> None:
        with torch.no_grad():
            model.layers[2].up.bias.add_(1)

    at_last_keeps_all(model, x, how, "weight up.bias was changed between", change)


@pytest.mark.parametrize("how", HOWS)
def test_a_buffer_that_is_another_before_backward(how: Any, device: str) -> None:
    class Shifted(Layer):
        def __init__(self) -> None:
            super().__init__(64)
            self.register_buffer("shift", torch.zeros(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.shift)

    model = Of(Shifted).to(device)

    def change() -> None:
        model.layers[2].shift = torch.ones(64, device=device)

    at_last_keeps_all(model, torch.randn(8, 64).to(device), how, "buffer shift was changed between", change)


@pytest.mark.parametrize("how", HOWS)
def test_evaluation_that_begins_before_backward(how: Any, device: str) -> None:
    model = Of(lambda: nn.Sequential(Layer(64), nn.Dropout(0.3), nn.Linear(64, 64), nn.Tanh())).to(device)
    at_last_keeps_all(model, torch.randn(8, 64).to(device), how, r"train\(\) or eval\(\) was called", model.eval)


@pytest.mark.parametrize("how", HOWS)
def test_settings_of_the_forward_alone(how: Any, device: str) -> None:
    """Random numbers of another type are other numbers."""

    class Scaled(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * torch.rand([]).to(x))

    model = Of(lambda: Scaled(64)).to(device)
    try:
        at_last_keeps_all(
            model,
            torch.randn(8, 64).to(device),
            how,
            "other settings of torch",
            lambda: torch.set_default_dtype(torch.float64),
        )
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("how", HOWS)
def test_an_input_that_is_changed_after_the_layer(how: Any, device: str) -> None:
    """Autograd does not need it again. The first backward finds that, and the next steps are plain ones."""

    class Changes(Of):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 1
            for layer in self.layers:
                before, x = x, layer(x)
                with torch.no_grad():
                    before.mul_(2)
            return x.pow(2).mean()

    class Adds(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + 1)

    model = Changes(lambda: Adds(64)).to(device)
    x = torch.randn(8, 64).to(device)
    right = plain(model, x)
    with tiering(device) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute=how)
        with pytest.raises(NotRepeatable, match="its input was changed between"):
            gradients(model, x, lambda: context)
        assert same(gradients(model, x, lambda: context), right)


class Surprises(nn.Module):
    """Does something else with its input when it is called a second time."""

    def __init__(self, second: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.second, self.calls = nn.Linear(64, 64), second, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner((x if self.calls != 2 else self.second(x)).sin()).tanh()


def fail(y: torch.Tensor) -> torch.Tensor:
    raise KeyError("a layer is called once")


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (fail, "the second time it ends with KeyError: 'a layer is called once'"),
        (lambda x: x[:4].clone(), "it saves other tensors the second time"),
    ],
)
@pytest.mark.parametrize("how", HOWS)
def test_a_trial_that_fails_costs_no_step(
    how: Any, second: Any, why: str, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(8, 64).to(device)
    right = plain(Of(lambda: Surprises(second), 1).to(device), x)
    model = Of(lambda: Surprises(second), 1).to(device)
    with tiering(device) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute=how)
        assert same(gradients(model, x, lambda: context), right)
    assert why in caplog.text


class ReadsTwice(torch.autograd.Function):
    """Torch's checkpoint gives a saved tensor once in a backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = ctx.saved_tensors[0]
        weight = ctx.saved_tensors[1]
        return grad * weight, (grad * x).sum(0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(64, 64), nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ReadsTwice.apply(self.inner(x).tanh(), self.scale)


@pytest.mark.parametrize("layers", [1, LAYERS])
@pytest.mark.parametrize("how", HOWS)
def test_a_backward_that_asks_twice_for_what_it_has_saved(
    how: Any, layers: int, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Of(Scaled, layers).to(device)
    x = torch.randn(8, 64).to(device)
    right = plain(model, x)
    with tiering(device) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute=how)
        if layers > 1:  # the others count on the trial of the first
            with pytest.raises(NotRepeatable, match="its backward asks twice"):
                gradients(model, x, lambda: context)
        assert same(gradients(model, x, lambda: context), right)
    assert "its backward asks twice for what it has saved" in caplog.text


@pytest.mark.parametrize("how", HOWS)
def test_a_layer_unlike_the_one_that_had_the_trial(how: Any, device: str) -> None:
    """In the first forward the others count on the first layer, which has nothing to draw."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.rate = nn.Linear(64, 64), 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.sin()).tanh() * (random.random() if self.rate else 1.0)

    model = Of(Skips).to(device)
    model.layers[-1].rate = 0.5
    x = torch.randn(8, 64).to(device)
    random.seed(0)
    with tiering(device) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute=how)
        with pytest.raises(NotRepeatable, match="random numbers of Python"):
            gradients(model, x, lambda: context)
        random.seed(0)
        found = gradients(model, x, lambda: context)
        random.seed(0)
        assert same(found, plain(model, x))


class Cache:
    """Of keys, one for each layer."""

    def __init__(self) -> None:
        self.layers: list[dict[str, torch.Tensor]] = []


class Caches(nn.Module):
    """Scales by what is in a cache, which it fills."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        y = self.inner(x.sin())
        cache.layers.append({"keys": y})
        return (y * len(cache.layers)).tanh()


@pytest.mark.parametrize("how", HOWS)
def test_a_cache_is_not_filled_twice(how: Any, device: str, caplog: pytest.LogCaptureFixture) -> None:
    class Cached(Of):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache = Cache()
            for layer in self.layers:
                x = layer(x, self.cache)
            loss = x.pow(2).mean()
            loss.register_hook(lambda gradient: self.cache.layers.clear())
            return loss

    model = Cached(Caches).to(device)
    x = torch.randn(8, 64).to(device)
    right = plain(model, x)
    with tiering(device, recompute="allow") as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute=how)
        for _ in range(STEPS):
            assert same(gradients(model, x, lambda: context), right)
    assert "it changes its argument, a Cache" in caplog.text


class Plain(nn.Module):
    """Attention without dropout, whose seed and offset are whatever was in the host's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inner(x).view(8, 4, 16, 3, 64).unbind(3)
        return x + functional.scaled_dot_product_attention(q, k, v).reshape(x.shape).sin()


@pytest.mark.parametrize("how", HOWS)
def test_attention_comes_again(how: Any, device: str) -> None:
    model = Of(Plain).to(device)
    x = torch.randn(8, 64, 64).to(device)
    right = plain(model, x)
    with tiering(device) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute=how)
        for _ in range(STEPS):
            assert same(gradients(model, x, lambda: context), right)
            junk = [torch.full((1,), number) for number in range(100)]  # what the next ones find in memory
            del junk
        assert all(each.excluded is None for each in manager._contexts._recomputer._kinds.values())


class Fused(nn.Module):
    """Attention as cuDNN has it: its seed lies on the device, and is whatever was there."""

    def __init__(self, attend: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attend(self.inner(x))[0].sin()


@pytest.fixture(scope="module")
def squares() -> Iterator[Callable[[torch.Tensor], Any]]:
    found = itertools.count()

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * x, torch.full((), next(found), dtype=torch.int64, device=x.device)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output[1])

    def backward(ctx: Any, grad: torch.Tensor, _: object) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * grad

    with torch.library._scoped_library("tiered_mem_tests", "DEF") as library:
        library.define("fused_attention(Tensor query) -> (Tensor output, Tensor philox_seed)")
        library.impl("fused_attention", forward, "CompositeExplicitAutograd")
        torch.library.register_autograd(
            "tiered_mem_tests::fused_attention", backward, setup_context=save, lib=library
        )
        yield torch.ops.tiered_mem_tests.fused_attention


@pytest.mark.parametrize("how", HOWS)
def test_a_blank_seed_on_the_device_need_not_come_again(
    how: Any, device: str, squares: Callable[[torch.Tensor], Any]
) -> None:
    model = Of(lambda: Fused(squares)).to(device)
    x = torch.randn(8, 64).to(device)
    right = plain(model, x)
    with tiering(device) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute=how)
        for _ in range(STEPS):
            assert same(gradients(model, x, lambda: context), right)
        assert all(each.excluded is None for each in manager._contexts._recomputer._kinds.values())


def test_layers_of_other_modules_are_other_kinds(device: str) -> None:
    """Both norms have weights of the same shapes, and only one changes buffers."""
    model = Of(lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))).to(device)
    model.layers[2][1] = nn.BatchNorm1d(64).to(device)
    x = torch.randn(8, 64).to(device)
    right = plain(model, x)
    with tiering(device) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute="full")
        for _ in range(STEPS):
            assert same(gradients(model, x, lambda: context), right)


def test_sparse_inputs_come_again() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.sparse.mm(edges, x)).tanh()

    class Graphs(Of):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, torch.eye(8).to_sparse())
            return x.pow(2).mean()

    model, x = Graphs(Graph), torch.randn(8, 64)
    right = plain(model, x)
    with tiering("cpu") as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute="full")
        for _ in range(STEPS):
            assert same(gradients(model, x, lambda: context), right)
        assert [len(each.equal) for each in manager._contexts._recomputer._kinds.values()] == [LAYERS]


@pytest.mark.parametrize("how", HOWS)
def test_an_operator_that_autocast_sees_inside_of(how: Any) -> None:
    """Not while it is watched: its products are of other types then, and so are the gradients."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Bilinear(16, 16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.sin(), x)

    model, x = Of(Pairs), torch.randn(8, 16)
    autocast = torch.autocast("cpu", torch.bfloat16)

    def step(*arounds: AbstractContextManager[Any]) -> list[Any]:
        def around() -> ExitStack:
            stack = ExitStack()
            for each in (autocast, *arounds):
                stack.enter_context(each)
            return stack

        return [each.clone() for each in gradients(model, x, around)]

    right = step()
    with tiering("cpu") as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute=how)
        with pytest.raises(NotRepeatable, match=r"autocast casts inside of aten\._trilinear"):
            step(context)
        assert same(step(context), right)


FIRST_FORWARD = """
import gc, weakref
gc.disable()
import torch
from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy
layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
def step(context):
    mine = torch.ones(4)
    with context:
        layers[1](layers[0](torch.ones(2, 8, requires_grad=True))).sum().backward()
    return weakref.ref(mine)
with TieringManager(policy=LayerOrderPolicy(recompute="full"), device="cpu", host_bytes="1MiB") as manager:
    print(step(manager.offload_context(layers, min_bytes=1))())
"""


@pytest.mark.once(why="it has a process of its own, without a device")
@pytest.mark.slow(why="a process imports torch")
def test_what_the_checkpoint_imports_keeps_no_frame(tmp_path: Path) -> None:
    found = run("-c", FIRST_FORWARD, cwd=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (found.stdout, found.returncode) == ("None\n", 0), found.stderr


@pytest.mark.skipif(not EMULATED, reason="an emulated kernel comes to other bits")
@pytest.mark.parametrize("how", HOWS)
def test_a_kernel_that_gives_other_bits_the_second_time(
    how: Any, device: str, device_module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In one element of one tensor. The step does not depend on it, and later ones neither."""
    import ascend_emulator

    model, x = stack(1, device)
    right = plain(model, x)
    with tiering(device) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute=how)
        y = x.detach().requires_grad_()
        model.zero_grad()
        with context:
            loss = model(y)
        device_module.synchronize()
        ascend_emulator.inject("aclnnGeluV2:1")
        try:
            loss.backward()
        finally:
            ascend_emulator.clear_faults()
        assert same([y.grad, *(weight.grad for weight in model.parameters())], right)
        assert "Layer is not computed again in backward, and keeps what it saves: a torch.float32" in caplog.text
        assert same(gradients(model, x, lambda: context), right)


@pytest.mark.skipif(not EMULATED, reason="an emulated kernel comes to other bits")
def test_other_bits_in_a_trial_that_others_count_on(device: str, device_module: Any) -> None:
    """The first layer has the trial, and comes last in backward: no gradient of its own is made."""
    import ascend_emulator

    model, x = stack(LAYERS, device)
    x.requires_grad_()
    with tiering(device) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute="full")
        with context:
            loss = model(x)
        device_module.synchronize()
        ascend_emulator.inject(f"aclnnGeluV2:{LAYERS}")
        try:
            with pytest.raises(NotRepeatable, match="other values the second time"):
                loss.backward()
        finally:
            ascend_emulator.clear_faults()
        del loss
        assert same(gradients(model, x, lambda: context), plain(model, x))
