"""mark_not_offload: what is marked stays on the device on every path; without the mark it would have moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cpu_offload.conftest import HOST_BYTES, KINDS, LEAST_ELEMENTS, MIB, MakeTensor, Memory, moving
from tests.cpu_offload.mxfp8 import MXFP8Quantizer, MXFP8Storage, MXFP8Tensor, bits, parts_of, same_bits
from tiered_mem.cpu_offload import (
    DefaultOffloadSynchronizer,
    OffloadableLayerState,
    mark_activation_offload,
    mark_not_offload,
    start_offload,
)

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    pytest.mark.detector_only(why="takes long"),
]

Offloading = Callable[..., Any]
Operation = Callable[[torch.Tensor], torch.Tensor]


def offloaded_bytes(state: OffloadableLayerState, *tensors: torch.Tensor) -> float:
    """Sends the tensors to the host and back, where they must be as they were."""
    pushed = [(state.push_tensor(tensor), bits(tensor)) for tensor in tensors]
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    nbytes = state.get_offloaded_total_size_mb() * MIB
    state.start_reload()
    assert all(same_bits(bits(state.pop_tensor(i)), was) for i, was in pushed)
    return nbytes


# What an operation saves of the marked tensor: the tensor itself, or something that shares its memory.
SAVES: dict[str, Operation] = {
    "itself": lambda x: x.sin(),
    "a view": lambda x: x.view(512, 512).sin(),
    "a transposed view": lambda x: x.transpose(0, 1).sin(),
    "a detached one": lambda x: x.sin() + x.detach().requires_grad_().cos(),
}
# What is marked in place of the tensor: something that shares its memory.
MARKED: dict[str, Operation] = {
    "a view": lambda x: x.view(-1),
    "a transposed view": lambda x: x.transpose(0, 2),
    "a part": lambda x: x[1],
    "a detached one": lambda x: x.detach(),
}


@pytest.mark.parametrize("when", ["never", "before", "inside", "after_it_is_saved"])
@pytest.mark.parametrize(
    ("saved", "marked"), [(saved, "itself") for saved in SAVES] + [("itself", marked) for marked in MARKED]
)
def test_the_input_of_an_operation(
    offloading: Offloading, make_tensor: MakeTensor, saved: str, marked: str, when: str
) -> None:
    x = make_tensor().requires_grad_()
    SAVES[saved](x).sum().backward()
    expected, x.grad = x.grad, None

    def mark(now: str) -> None:
        if now == when:
            mark_not_offload(x if marked == "itself" else MARKED[marked](x))

    context, sync, controller = offloading(model_layers=1, manual_synchronization=True)
    mark("before")
    with context:
        mark("inside")
        y = SAVES[saved](x)
        mark("after_it_is_saved")
    y = sync(y)
    controller.start_offload_layer(0)
    controller.release_activation_forward_gpu_memory(0)
    assert controller.get_offloaded_total_size_mb() * MIB == (x.nbytes if when == "never" else 0)
    controller.start_reload_layer(0)
    y.sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("marked", [True, False])
def test_the_output_of_an_operation(offloading: Offloading, make_tensor: MakeTensor, marked: bool) -> None:
    x = make_tensor().requires_grad_()
    x.sigmoid().sum().backward()
    expected, x.grad = x.grad, None
    context, sync, controller = offloading(model_layers=1, manual_synchronization=True)
    with context:
        y = x.sigmoid()
    if marked:
        mark_not_offload(y)
    y = sync(y)
    controller.start_offload_layer(0)
    controller.release_activation_forward_gpu_memory(0)
    assert controller.get_offloaded_total_size_mb() * MIB == (0 if marked else y.nbytes)
    controller.start_reload_layer(0)
    y.sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("marked", [True, False])
def test_the_default_schedule_keeps_it(
    offloading: Offloading, make_tensor: MakeTensor, memory: Memory, marked: bool
) -> None:
    context, sync = offloading(num_layers=1, model_layers=3)
    x = make_tensor().requires_grad_()
    out = x
    if marked:
        mark_not_offload(x)
    for _ in range(3):
        with context:
            out = out.sin()
        out = sync(out)
    assert context.offload_synchronizer.get_offloaded_total_size_mb() * MIB == (0 if marked else x.nbytes)
    out.sum().backward()


@pytest.mark.parametrize("order", ["before", "after", "alone"])
def test_mark_activation_offload_does_not_undo_it(
    state: OffloadableLayerState, make_tensor: MakeTensor, order: str
) -> None:
    x = make_tensor()
    if order == "before":
        mark_activation_offload(x)
    if order != "alone":
        mark_not_offload(x)
    if order != "before":
        mark_activation_offload(x)
    nbytes = offloaded_bytes(state, x)
    assert nbytes == (x.nbytes if order == "alone" else 0)


@pytest.mark.parametrize("told", [True, False])
def test_start_offload_does_not_undo_it(state: OffloadableLayerState, make_tensor: MakeTensor, told: bool) -> None:
    x = make_tensor(shape=(8, 256, 256))
    view = x[::2]
    mark_not_offload(x)
    start_offload(view, offload_base_tensor=told)
    assert offloaded_bytes(state, view) == 0


@pytest.mark.parametrize("when", ["never", "before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_push_to_a_layer_state(
    state: OffloadableLayerState, make_tensor: MakeTensor, memory: Memory, kind: str, when: str
) -> None:
    x = make_tensor(kind)
    expected, sizes, addresses = bits(x), moving(x), [part.data_ptr() for part in parts_of(x)]
    if when == "before":
        mark_not_offload(x)
    i = state.push_tensor(x)
    if when == "after":
        mark_not_offload(x)
    before = memory.used()
    del x
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    moved = when == "never"
    assert before - memory.used() == (memory.of(*sizes) if moved else 0)
    assert state.get_offloaded_total_size_mb() * MIB == (sum(sizes) if moved else 0)
    state.start_reload()
    assert same_bits(bits(state.pop_tensor(i)), expected)
    if not moved:
        assert [part.data_ptr() for part in parts_of(state.pop_tensor(i))] == addresses


@pytest.mark.parametrize("when", ["never", "before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_push_to_a_synchronizer(make_tensor: MakeTensor, kind: str, when: str) -> None:
    synchronizer = DefaultOffloadSynchronizer(num_layers=2, num_offloaded_layers=1, host_bytes=HOST_BYTES)
    x = make_tensor(kind)
    expected, sizes = bits(x), moving(x)
    if when == "before":
        mark_not_offload(x)
    synchronizer.fwd_step()
    i = synchronizer.push_tensor(x)
    if when == "after":
        mark_not_offload(x)
    del x
    synchronizer.fwd_step()
    assert synchronizer.get_offloaded_total_size_mb() * MIB == (sum(sizes) if when == "never" else 0)
    synchronizer.bwd_step(1)
    synchronizer.bwd_step(0)
    assert same_bits(bits(synchronizer.pop_tensor(i)), expected)
    synchronizer.finish_part_of_bwd()


def test_a_mark_that_comes_after_the_copy_began_does_no_harm(
    state: OffloadableLayerState, make_tensor: MakeTensor
) -> None:
    x = make_tensor()
    expected = bits(x)
    i = state.push_tensor(x)
    state.start_offload()
    mark_not_offload(x)
    del x
    state.release_activation_forward_gpu_memory()
    state.start_reload()
    assert same_bits(bits(state.pop_tensor(i)), expected)


@pytest.mark.parametrize("marked", ["nothing", "the tensor", "its parts", "its data"])
@pytest.mark.parametrize("pushed", ["the tensor", "its parts", "a detached one"])
def test_a_quantized_tensor_and_its_parts(
    state: OffloadableLayerState, make_tensor: MakeTensor, marked: str, pushed: str
) -> None:
    x = make_tensor("mxfp8")
    assert isinstance(x, MXFP8Tensor)
    marks = {"nothing": [], "the tensor": [x], "its parts": parts_of(x), "its data": list(x.get_data_tensors())}
    mark_not_offload(*marks[marked])
    assert None not in x.parts(), "a mark leaves the tensor as it is"
    pushes = {"the tensor": [x], "its parts": parts_of(x), "a detached one": [x.detach()]}
    assert offloaded_bytes(state, *pushes[pushed]) == (sum(moving(x)) if marked == "nothing" else 0)


@pytest.mark.parametrize("marked", [True, False])
def test_one_part_of_a_quantized_tensor(
    state: OffloadableLayerState, make_tensor: MakeTensor, marked: bool
) -> None:
    x = make_tensor("mxfp8")
    rowwise, columnwise = x.get_data_tensors()
    if marked:
        mark_not_offload(rowwise)
    nbytes = offloaded_bytes(state, x)
    assert nbytes == columnwise.nbytes + (0 if marked else rowwise.nbytes)


@pytest.mark.parametrize("marked", [True, False])
def test_a_storage_class_that_is_no_tensor(
    state: OffloadableLayerState, make_tensor: MakeTensor, marked: bool
) -> None:
    storage = MXFP8Quantizer().storage(make_tensor())
    if marked:
        mark_not_offload(storage)
    parts = [part for part in storage.parts() if part is not None]
    assert len(parts) == 4, "a mark leaves the storage as it is"
    start_offload(storage)
    assert None not in storage.parts()
    nbytes = offloaded_bytes(state, *parts)
    assert nbytes == (0 if marked else sum(part.nbytes for part in storage.get_data_tensors()))


@pytest.mark.parametrize("marked", ["nothing", "the tensor", "the storage"])
def test_scales_that_are_large_enough_to_move(device: str, state: OffloadableLayerState, marked: str) -> None:
    """Transformer Engine counts them among the parts, but not among the data."""
    scale = torch.arange(LEAST_ELEMENTS).to(torch.uint8).to(device)
    data = torch.arange(LEAST_ELEMENTS * 4).to(torch.uint8).to(device)
    parts = [data, None, scale, None]
    x = MXFP8Tensor(parts, data.shape, data.device)
    mark_not_offload(*{"nothing": [], "the tensor": [x], "the storage": [MXFP8Storage(parts)]}[marked])
    nbytes = offloaded_bytes(state, x)
    assert nbytes == (data.nbytes + scale.nbytes if marked == "nothing" else 0)


def test_nothing_at_all_may_be_marked() -> None:
    """A layer without a bias marks its bias, too."""
    mark_not_offload()
    mark_not_offload(None, torch.randn(3), None)
    mark_activation_offload(None)
    start_offload(None)


def test_a_mark_ends_with_the_tensors_memory(state: OffloadableLayerState, make_tensor: MakeTensor) -> None:
    torch.manual_seed(0)
    x = make_tensor()
    mark_not_offload(x)
    assert offloaded_bytes(state, x) == 0
    address = x.data_ptr()
    state.release_all_memory()
    del x
    others = [make_tensor() for _ in range(4)]
    other = next(other for other in others if other.data_ptr() == address)
    assert offloaded_bytes(state, other) == other.nbytes


def test_a_mark_is_not_taken_over_by_a_copy(state: OffloadableLayerState, make_tensor: MakeTensor) -> None:
    x = make_tensor()
    mark_not_offload(x)
    copy = x.clone()
    assert offloaded_bytes(state, copy) == copy.nbytes
