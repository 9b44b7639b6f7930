"""Tensors that share memory: it moves once, and each view comes back as the view that it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.cpu_offload.conftest import MIB, MakeTensor, Memory
from tiered_mem.cpu_offload import OffloadableLayerState, start_offload

pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.mark.parametrize("marked", [True, False])
def test_interleaved_views_move_as_their_one_base(
    state: OffloadableLayerState, make_tensor: MakeTensor, memory: Memory, marked: bool
) -> None:
    start = memory.used()
    x = make_tensor(shape=(8, 256, 256))
    expected = x.cpu()
    views = [x[::2], x[1::2]]
    if marked:
        start_offload(*views, offload_base_tensor=True)
    ids = [state.push_tensor(view) for view in views]
    size, nbytes = memory.of(x.nbytes), x.nbytes
    del views, x
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    assert memory.used() == start
    assert state.get_offloaded_total_size_mb() == nbytes / MIB
    state.start_reload()
    even, odd = (state.pop_tensor(i) for i in ids)
    assert memory.used() == start + size
    assert even.untyped_storage().data_ptr() == odd.untyped_storage().data_ptr()
    assert torch.equal(even.cpu(), expected[::2])
    assert torch.equal(odd.cpu(), expected[1::2])


@pytest.mark.parametrize("marked", [True, False])
def test_a_small_part_takes_its_base_along_where_it_is_told_to(
    state: OffloadableLayerState, make_tensor: MakeTensor, marked: bool
) -> None:
    x = make_tensor(shape=(12, 256, 256))
    view = x[3:7]
    expected = view.cpu()
    start_offload(view, offload_base_tensor=marked)
    i = state.push_tensor(view)
    nbytes = x.nbytes if marked else view.nbytes
    del view
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    assert state.get_offloaded_total_size_mb() == nbytes / MIB
    del x
    state.start_reload()
    assert torch.equal(state.pop_tensor(i).cpu(), expected)


@pytest.mark.parametrize(
    "again",
    [
        lambda x: x,
        lambda x: x.view(-1),
        lambda x: x.view(256, -1),
        lambda x: x.detach(),
        lambda x: x.transpose(0, 1),
        lambda x: x.view(torch.int16),
    ],
    ids=["itself", "flat", "reshaped", "detached", "transposed", "other_dtype"],
)
def test_what_is_pushed_again_in_another_shape_moves_once(
    state: OffloadableLayerState,
    make_tensor: MakeTensor,
    memory: Memory,
    again: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    start = memory.used()
    x = make_tensor()
    other = again(x)
    pairs = [(state.push_tensor(tensor), tensor.cpu(), tensor.stride()) for tensor in (x, other, x)]
    size, nbytes = memory.of(x.nbytes), x.nbytes
    del x, other
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    assert memory.used() == start
    assert state.get_offloaded_total_size_mb() == nbytes / MIB
    state.start_reload()
    assert memory.used() == start + size
    for i, expected, stride in pairs:
        tensor = state.pop_tensor(i)
        assert tensor.stride() == stride
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor.cpu(), expected)
