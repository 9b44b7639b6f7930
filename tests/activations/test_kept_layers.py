"""Layers whose saved tensors a policy leaves to autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tests.activations.recomputing import Of, gradients, plain, same, saved_bytes, tiering
from tests.models import Layer, stack
from tiered_mem import PolicyError, TieringManager
from tiered_mem.policies import Event, LayerBegin, LayerEnd, Policy, Saved
from tiered_mem.policies.actions import Advice, Keep

LAYERS = 6


class Keeping(Policy):
    """Leaves so many layers to autograd, from one on. told: the layers of the events that have one."""

    def __init__(self, first: int, layers: int) -> None:
        self.answer = Keep(first, layers)
        self.told: list[tuple[type[Event], int]] = []

    def decide(self, event: Event) -> Sequence[Advice]:
        if (layer := getattr(event, "layer", None)) is not None:
            self.told.append((type(event), layer))
        begins = isinstance(event, LayerBegin) and not event.backward and event.layer == self.answer.layer
        return (self.answer,) if begins else ()

    def layers(self, kind: type[Event]) -> set[int]:
        return {layer for each, layer in self.told if each is kind}


class Hooked(nn.Module):
    """A layer that notes whether what it saves goes to anybody's hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Layer(64)
        self.hooked: list[bool] = []
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hooked.append(is_hooked())
        if self.fails:
            raise ValueError("it fails")
        y: torch.Tensor = self.inside(x)
        return y


def is_hooked() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def hooked(model: Of) -> list[bool]:
    """Of each layer, in the last forward."""
    return [layer.hooked[-1] for layer in model.layers]


def model_of_hooked(device: str) -> tuple[Of, torch.Tensor, list[Any]]:
    model, x = Of(Hooked, LAYERS).to(device), torch.randn(16, 128, 64).to(device)
    return model, x, plain(model, x)


def contexts(manager: TieringManager, model: Of, *, attached: bool) -> Callable[[], Any]:
    """What makes the context of each forward; none where the model is attached."""
    if attached:
        manager.attach(model, layers=model.layers, min_bytes=1)
        return contextlib.nullcontext
    return lambda: manager.offload_context(model.layers, min_bytes=1)


@pytest.mark.parametrize("attached", [False, True])
def test_what_they_save_is_autograds_own_and_nothing_is_told_of_them(attached: bool, device: str) -> None:
    model, x, right = model_of_hooked(device)
    policy = Keeping(1, 3)
    with tiering(device, policy) as manager:
        assert same(gradients(model, x, contexts(manager, model, attached=attached)), right)
        assert hooked(model) == [True, False, False, False, True, True]
        assert not is_hooked()
        assert policy.layers(LayerBegin) == {0, 1, 4, 5}
        assert policy.layers(Saved) == {0, 4, 5}


def test_a_forward_that_keeps_all_says_nothing_of_other_hooks(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, x, right = model_of_hooked(device)
    with tiering(device, Keeping(0, 99)) as manager:
        context = manager.offload_context(model.layers, min_bytes=1)
        assert saved_bytes(manager, model, x, context) == 0
        assert same(gradients(model, x, lambda: context), right)
    assert not [record for record in caplog.records if "hooks" in record.message]


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("failing", [1, 2])
def test_one_that_fails_leaves_hooks_as_they_were(attached: bool, failing: int, device: str) -> None:
    model, x, right = model_of_hooked(device)
    with tiering(device, Keeping(1, 3)) as manager:
        context = contexts(manager, model, attached=attached)
        layer: Any = model.layers[failing]
        layer.fails = True
        for _ in range(2):
            with pytest.raises(ValueError, match="it fails"):
                gradients(model, x, context)
            assert not is_hooked()
        layer.fails = False
        assert same(gradients(model, x, context), right)


def test_an_interrupt_that_no_hook_hears_of_leaves_them_as_they_were(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C does that comes before a layer's hooks."""
    model, x, right = model_of_hooked(device)
    with tiering(device, Keeping(1, 3)) as manager:
        context = manager.offload_context(model.layers, min_bytes=1)
        interrupted = model.layers[2]

        def called(module: Any, y: torch.Tensor) -> Any:
            """One of them begins as a layer, and never ends as one."""
            if module is not interrupted:
                return nn.Module.__call__(module, y)
            for hook in module._forward_pre_hooks.values():
                hook(module, (y,), {})
            assert not is_hooked()
            raise KeyboardInterrupt

        monkeypatch.setattr(Hooked, "__call__", called)
        with pytest.raises(KeyboardInterrupt):
            gradients(model, x, lambda: context)
        monkeypatch.undo()
        assert not is_hooked()
        assert same(gradients(model, x, lambda: context), right)


def test_layers_inside_kept_ones_are_kept_with_them(device: str) -> None:
    model, x, right = model_of_hooked(device)
    inside = [part for layer in model.layers for part in (layer, layer.inside)]
    policy = Keeping(2, 1)  # the second one of the model, and not what is inside of it
    with tiering(device, policy) as manager:
        assert same(gradients(model, x, lambda: manager.offload_context(inside, min_bytes=1)), right)
    assert hooked(model) == [True, False, True, True, True, True]
    assert policy.layers(Saved).isdisjoint({2, 3})


def test_layers_inside_kept_ones_count_among_them(device: str) -> None:
    model, x, right = model_of_hooked(device)
    inside = [part for layer in model.layers for part in (layer, layer.inside)]
    policy = Keeping(2, 4)
    with tiering(device, policy) as manager:
        assert same(gradients(model, x, lambda: manager.offload_context(inside, min_bytes=1)), right)
    assert hooked(model) == [True, False, False, True, True, True]
    assert policy.layers(LayerBegin) == {0, 1, 2, *range(6, 2 * LAYERS)}
    assert policy.layers(LayerEnd) == {0, 1, *range(6, 2 * LAYERS)}


def test_a_layer_context_passes_it_over(device: str) -> None:
    _model, x, right = model_of_hooked(device)
    policy = Keeping(1, 3)

    with tiering(device, policy) as manager:
        offload = manager.layer_context(LAYERS, min_bytes=1)

        class InContexts(Of):
            def forward(self, y: torch.Tensor) -> torch.Tensor:
                for layer in self.layers:
                    with offload:
                        y = layer(y)
                    y = offload.sync(y)
                return y.pow(2).mean()

        in_contexts = InContexts(Hooked, LAYERS).to(device)  # the same weights
        assert same(gradients(in_contexts, x, contextlib.nullcontext), right)
        assert policy.layers(LayerBegin) == policy.layers(Saved) == set(range(LAYERS))


def test_hooks_of_the_users_around_them_do_not_get_what_was_not_theirs(device: str) -> None:
    model, x, right = model_of_hooked(device)
    policy = Keeping(1, 3)
    seen: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return tensor.detach()

    @contextlib.contextmanager
    def around() -> Any:
        with saved_tensors_hooks(pack, lambda tensor: tensor), manager.offload_context(model.layers, min_bytes=1):
            yield

    with tiering(device, policy) as manager:
        assert same(gradients(model, x, around), right)
    assert not seen
    assert policy.layers(LayerBegin) == policy.layers(Saved) == set(range(LAYERS))


def test_a_wish_to_compute_them_again_comes_first(device: str) -> None:
    model, x = stack(LAYERS, device)
    right = plain(model, x)
    policy = Keeping(0, 99)
    with tiering(device, policy) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute="full")
        for _ in range(LAYERS + 2):
            assert same(gradients(model, x, lambda: context), right)
        assert saved_bytes(manager, model, x, context) > 0
    assert policy.layers(LayerBegin) == set(range(LAYERS))


def test_with_a_disk_tier_or_a_trace_all_are_told(device: str, tmp_path: Path) -> None:
    model, x, right = model_of_hooked(device)
    for arguments in ({"spill_dir": tmp_path, "spill_bytes": "16MiB"}, {"trace": True}):
        policy = Keeping(0, 99)
        with TieringManager(policy=policy, device=device, host_bytes="16MiB", **arguments) as manager:  # type: ignore[arg-type]
            assert same(gradients(model, x, lambda: manager.offload_context(model.layers, min_bytes=1)), right)
        assert policy.layers(Saved) == set(range(LAYERS)), arguments


@pytest.mark.parametrize(("wrong", "what"), [(("all", 1), "position of a layer"), ((0, "all"), "number of layers")])
def test_what_they_are_is_told_by_ints(wrong: Any, what: str, device: str) -> None:
    model, x = stack(2, device)
    policy = Keeping(0, 1)
    policy.answer = Keep(*wrong)
    policy.decide = lambda event: [policy.answer] if isinstance(event, LayerBegin) else ()  # type: ignore
    with (
        TieringManager(policy=policy, device=device, host_bytes="16MiB") as manager,
        pytest.raises(PolicyError, match=rf"Keep\(.*'all'.*\): the {what} is an int"),
        manager.offload_context(model.layers),
    ):
        model(x)


def test_where_there_is_room_policy_auto_keeps_them_by_itself(device: str, device_module: Any) -> None:
    model, x, right = model_of_hooked(device)
    plain(model, x)
    free = device_module.memory_allocated() + 64 * LAYERS * x.nbytes
    with TieringManager(policy="auto", device=device, device_budget=free, host_bytes="64MiB") as manager:
        context = manager.offload_context(model.layers, min_bytes=1)
        for _ in range(12):
            assert same(gradients(model, x, lambda: context), right)
            assert not is_hooked()
        assert hooked(model) == [True] + [False] * (LAYERS - 1)
        assert manager.stats()["offloaded.bytes.total"] == 0
