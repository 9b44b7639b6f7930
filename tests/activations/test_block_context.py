"""async_save_on_cpu: the context of xtuner's and MindSpeed's loops, over the manager's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from tests.conftest import MakeManager
from tests.models import Stack, backward, equal, small_stack
from tiered_mem import TieringManager, async_save_on_cpu
from tiered_mem.policies import Action, Event, ForwardBegin, LayerOrderPolicy

pytestmark = pytest.mark.usefixtures("no_gc")


LAYERS = 4


def forward(
    model: Stack,
    x: torch.Tensor,
    manager: TieringManager,
    *,
    blocks: Sequence[int] = range(LAYERS),
    check: Callable[[torch.Tensor], bool] | None = None,
    group: object = None,
) -> torch.Tensor:
    """The model's loss, with some of its blocks, each in a context of its own."""
    for i in blocks:
        with async_save_on_cpu(None, None, i, LAYERS, check, group=group, min_bytes=1, manager=manager):
            x = model.layers[i](x)
    return x.pow(2).mean()


def plain(model: Stack, x: torch.Tensor, blocks: Sequence[int] = range(LAYERS)) -> list[torch.Tensor]:
    y = x
    for i in blocks:
        y = model.layers[i](y)
    return backward(y.pow(2).mean(), model, x)


def test_the_blocks_move_and_come_back_in_time(device: str, make_manager: MakeManager) -> None:
    model, x = small_stack(LAYERS, device)
    expected = plain(model, x)
    manager = make_manager(LAYERS - 1)
    for _ in range(3):
        assert equal(backward(forward(model, x, manager), model, x), expected)
    assert int(manager.stats()["offloaded.blocks.total"]) > 0
    assert manager.stats()["reloads_on_demand.total"] == 0


@pytest.mark.parametrize("blocks", [(0, 2), (1, 3), (3,)])
def test_some_of_the_blocks_only(device: str, make_manager: MakeManager, blocks: tuple[int, ...]) -> None:
    """A forward that skips blocks, and the next one, begin where the numbers do not rise."""
    model, x = small_stack(LAYERS, device)
    manager = make_manager(LAYERS - 1)
    for each in (blocks, range(LAYERS), blocks):
        assert equal(backward(forward(model, x, manager, blocks=each), model, x), plain(model, x, each))


def test_two_forwards_in_flight(device: str, make_manager: MakeManager) -> None:
    model, x = small_stack(LAYERS, device)
    expected = plain(model, x)
    manager = make_manager(LAYERS - 1)
    first, second = (forward(model, x, manager) for _ in range(2))
    assert equal(backward(first, model, x), expected)
    assert equal(backward(second, model, x), expected)


def test_what_the_check_says_no_to_stays(device: str, make_manager: MakeManager) -> None:
    model, x = small_stack(LAYERS, device)
    expected = plain(model, x)
    manager = make_manager(LAYERS - 1)
    asked: list[tuple[int, ...]] = []

    def wide(tensor: torch.Tensor) -> bool:
        asked.append(tuple(tensor.shape))
        return tensor.shape[-1] == 64

    assert equal(backward(forward(model, x, manager, check=wide), model, x), expected)
    some = int(manager.stats()["offloaded.bytes.total"])
    assert equal(backward(forward(model, x, manager), model, x), expected)
    assert 0 < some < int(manager.stats()["offloaded.bytes.total"]) - some
    assert (32, 16) in asked


class Counting(LayerOrderPolicy):
    """Counts the forwards."""

    forwards = 0

    def decide(self, event: Event) -> Sequence[Action]:
        self.forwards += isinstance(event, ForwardBegin)
        return super().decide(event)


def test_groups_are_counted_apart(device: str) -> None:
    """The blocks of a second tower between those of the first do not begin a new forward of it."""
    model, x = small_stack(LAYERS, device)
    policy = Counting()
    manager = TieringManager(policy=policy, device=device, host_bytes="64MiB")

    def step(around: Callable[[int, str], contextlib.AbstractContextManager[object]]) -> list[torch.Tensor]:
        y = z = x
        for i in range(LAYERS):
            with around(i, "text"):
                y = model.layers[i](y)
            with around(i, "vision"):
                z = model.layers[i](z.sin())
        return backward(y.pow(2).mean() + z.pow(2).mean(), model, x)

    block = partial(async_save_on_cpu, None, None, depth=LAYERS, min_bytes=1, manager=manager)
    expected = step(lambda i, group: contextlib.nullcontext())
    assert equal(step(lambda i, group: block(block_idx=i, group=group)), expected)
    assert policy.forwards == 2
    manager.close()


def test_an_error_in_a_block_leaves_the_next_forward_whole(device: str, make_manager: MakeManager) -> None:
    model, x = small_stack(LAYERS, device)
    manager = make_manager(LAYERS - 1)
    with pytest.raises(RuntimeError), async_save_on_cpu(block_idx=0, depth=LAYERS, min_bytes=1, manager=manager):
        model.layers[0](x[:, :3])
    assert equal(backward(forward(model, x, manager), model, x), plain(model, x))


def test_without_gradients_it_does_nothing(device: str) -> None:
    model, x = small_stack(LAYERS, device)
    policy = Counting()
    with TieringManager(policy=policy, device=device, host_bytes="64MiB") as manager, torch.no_grad():
        forward(model, x, manager)
    assert policy.forwards == 0


def test_arguments_that_cannot_be_right(make_manager: MakeManager) -> None:
    manager = make_manager(LAYERS - 1)
    with pytest.raises(ValueError, match="from 0 to 3"):
        async_save_on_cpu(block_idx=4, depth=4, manager=manager)
    with pytest.warns(UserWarning, match="no effect"):
        async_save_on_cpu(block_idx=0, depth=4, prefetch=False, manager=manager)
