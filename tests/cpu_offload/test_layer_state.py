"""OffloadableLayerState: the tensors of one layer go to the host and come back as they were."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conftest import Link
from tests.cpu_offload.conftest import KINDS, LEAST_ELEMENTS, MIB, MakeTensor, Memory, moving, staying
from tests.cpu_offload.mxfp8 import MXFP8Tensor, bits, parts_of, same_bits
from tiered_mem.cpu_offload import OffloadableLayerState

pytestmark = pytest.mark.usefixtures("no_gc")

MakeState = Callable[..., OffloadableLayerState]


def go_and_come_back(state: OffloadableLayerState) -> None:
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    state.start_reload()


@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 8, 3, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_come_back_with_the_same_bits(
    state: OffloadableLayerState, make_tensor: MakeTensor, memory: Memory, kind: str, counts: tuple[int, ...]
) -> None:
    start = memory.used()
    for count in counts:
        tensors = [make_tensor(kind) for _ in range(count)]
        expected = [bits(tensor) for tensor in tensors]
        meta = [(type(tensor), tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        ids = [state.push_tensor(tensor) for tensor in tensors]
        assert all(same_bits(bits(tensor), was) for tensor, was in zip(tensors, expected, strict=True))
        sizes = [size for tensor in tensors for size in moving(tensor)]
        left = [size for tensor in tensors for size in staying(tensor)]
        del tensors
        state.start_offload()
        state.release_activation_forward_gpu_memory()
        assert memory.used() == start + memory.of(*left)
        assert state.get_offloaded_total_size_mb() == sum(sizes) / MIB
        state.start_reload()
        for i, was, like in zip(ids, expected, meta, strict=True):
            tensor = state.pop_tensor(i)
            assert (type(tensor), tensor.shape, tensor.dtype, tensor.device) == like
            assert same_bits(bits(tensor), was)
        del tensor, ids, i
        state.release_all_memory()
        assert memory.used() == start
        assert state.get_offloaded_total_size_mb() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_is_usable_while_it_leaves(
    state: OffloadableLayerState, make_tensor: MakeTensor, kind: str
) -> None:
    tensor = make_tensor(kind)
    expected = bits(tensor)
    ids = [state.push_tensor(tensor) for _ in range(3)]
    state.start_offload()
    assert same_bits(bits(tensor), expected)
    state.release_activation_forward_gpu_memory()
    assert same_bits(bits(tensor), expected)
    state.start_reload()
    assert all(same_bits(bits(state.pop_tensor(i)), expected) for i in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_may_be_had_several_times(
    state: OffloadableLayerState, make_tensor: MakeTensor, kind: str
) -> None:
    """Once each by two users, of whom one takes it apart."""
    tensor = make_tensor(kind)
    expected = bits(tensor)
    i = state.push_tensor(tensor)
    del tensor
    go_and_come_back(state)
    first, second = state.pop_tensor(i), state.pop_tensor(i)
    assert [part.data_ptr() for part in parts_of(first)] == [part.data_ptr() for part in parts_of(second)]
    if isinstance(first, MXFP8Tensor):
        first.prepare_for_saving()
    assert same_bits(bits(second), expected)
    del first, second
    assert same_bits(bits(state.pop_tensor(i)), expected)


def test_what_never_left_comes_from_where_it_is(state: OffloadableLayerState, make_tensor: MakeTensor) -> None:
    tensor = make_tensor()
    assert state.pop_tensor(state.push_tensor(tensor)).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("elements", [LEAST_ELEMENTS - 1, LEAST_ELEMENTS])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_small_tensors_stay(device: str, state: OffloadableLayerState, elements: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(elements).to(dtype).to(device)
    expected = bits(tensor)
    i = state.push_tensor(tensor)
    go_and_come_back(state)
    moved = elements == LEAST_ELEMENTS
    assert state.get_offloaded_total_size_mb() * MIB == moved * tensor.nbytes
    assert (state.pop_tensor(i).data_ptr() != tensor.data_ptr()) == moved
    assert same_bits(bits(state.pop_tensor(i)), expected)


def test_weights_and_tensors_of_the_cpu_stay(state: OffloadableLayerState, make_tensor: MakeTensor) -> None:
    weight = torch.nn.Parameter(make_tensor(shape=(512, 1024)))
    tensors = [weight, weight.t(), weight.view(-1), torch.randn(512, 1024)]
    ids = [state.push_tensor(tensor) for tensor in tensors]
    go_and_come_back(state)
    assert state.get_offloaded_total_size_mb() == 0
    for i, tensor in zip(ids, tensors, strict=True):
        assert state.pop_tensor(i).data_ptr() == tensor.data_ptr()
        assert state.pop_tensor(i).stride() == tensor.stride()


PUSH, START, RELEASE, RELOAD, POP = "push", "start", "release", "reload", "pop"
WRONG_ORDERS = [
    (RELEASE,),
    (RELOAD,),
    (START, START),
    (START, PUSH),
    (START, RELOAD),
    (START, POP),
    (START, RELEASE, START),
    (START, RELEASE, PUSH),
    (START, RELEASE, RELEASE),
    (START, RELEASE, POP),
    (START, RELEASE, RELOAD, START),
    (START, RELEASE, RELOAD, PUSH),
    (START, RELEASE, RELOAD, RELEASE),
    (START, RELEASE, RELOAD, RELOAD),
]


@pytest.mark.parametrize("order", WRONG_ORDERS, ids=" ".join)
def test_a_wrong_order_of_calls_is_refused(
    state: OffloadableLayerState, make_tensor: MakeTensor, memory: Memory, order: tuple[str, ...]
) -> None:
    start = memory.used()
    i = state.push_tensor(make_tensor())
    calls: dict[str, Callable[[], object]] = {
        PUSH: lambda: state.push_tensor(make_tensor()),
        START: state.start_offload,
        RELEASE: state.release_activation_forward_gpu_memory,
        RELOAD: state.start_reload,
        POP: lambda: state.pop_tensor(i),
    }
    *before, last = order
    for call in before:
        calls[call]()
    with pytest.raises(RuntimeError, match="Invalid state"):
        calls[last]()
    state.release_all_memory()
    assert memory.used() == start
    torch.manual_seed(1)
    tensor = make_tensor()
    i = state.push_tensor(tensor)
    go_and_come_back(state)
    assert torch.equal(state.pop_tensor(i), tensor), "after a release of all memory the state is like new"


@pytest.mark.parametrize("calls", range(4))
def test_all_memory_is_released_at_any_time(
    state: OffloadableLayerState, make_tensor: MakeTensor, memory: Memory, calls: int
) -> None:
    """In the late schedule the copies have not even begun."""
    start = memory.used()
    i = state.push_tensor(make_tensor())
    steps = (state.start_offload, state.release_activation_forward_gpu_memory, state.start_reload)
    for step in steps[:calls]:
        step()
    state.release_all_memory()
    assert memory.used() == start
    assert state.get_offloaded_total_size_mb() == 0
    with pytest.raises(RuntimeError):
        state.pop_tensor(i)
    make_tensor().fill_(1)  # in the memory that the tensor had, perhaps


def test_the_memory_of_a_popped_tensor_is_its_users(state: OffloadableLayerState, make_tensor: MakeTensor) -> None:
    tensor = make_tensor()
    expected = tensor.cpu()
    i = state.push_tensor(tensor)
    del tensor
    go_and_come_back(state)
    tensor = state.pop_tensor(i)
    state.release_all_memory()
    others = [make_tensor() for _ in range(3)]
    assert all(other.data_ptr() != tensor.data_ptr() for other in others)
    assert torch.equal(tensor.cpu(), expected)


def test_a_layer_that_saves_nothing_may_go_through_it_all(state: OffloadableLayerState, memory: Memory) -> None:
    start = memory.used()
    for _ in range(2):
        go_and_come_back(state)
        state.release_all_memory()
    assert memory.used() == start


@pytest.mark.parametrize("retain", [True, False])
def test_host_buffers_are_never_taken_for_others(
    make_state: MakeState, make_tensor: MakeTensor, retain: bool
) -> None:
    """Retained ones serve the next iteration, which may save something else."""
    state = make_state(retain_pinned_cpu_buffers=retain)
    shapes = [((4, 256, 256),), ((4, 256, 256),), ((256, 1024), (4, 256, 256)), ((8, 256, 256),), ((256, 2048),)]
    for shape, dtype in itertools.product(shapes, (torch.bfloat16, torch.int16, torch.float32)):
        tensors = [make_tensor(shape=s).view(torch.int16).to(dtype) for s in shape]
        expected = [tensor.cpu() for tensor in tensors]
        ids = [state.push_tensor(tensor) for tensor in tensors]
        del tensors
        go_and_come_back(state)
        for i, was in zip(ids, expected, strict=True):
            assert same_bits([state.pop_tensor(i).cpu()], [was])
        state.release_all_memory()


def test_ids_of_many_states_differ(make_state: MakeState, make_tensor: MakeTensor) -> None:
    """An id that got to the wrong state is noticed, not answered with that state's own tensor."""
    one, other = make_state(), make_state()
    tensor = make_tensor()
    i, j = one.push_tensor(tensor), other.push_tensor(make_tensor())
    assert i != j
    with pytest.raises(RuntimeError):
        other.pop_tensor(i)


def test_tensors_come_back_in_any_order(state: OffloadableLayerState, make_tensor: MakeTensor) -> None:
    pushed = []
    for _ in range(8):
        tensor = make_tensor()
        pushed.append((state.push_tensor(tensor), tensor.cpu()))
    del tensor
    go_and_come_back(state)
    random.Random(0).shuffle(pushed)
    assert all(torch.equal(state.pop_tensor(i).cpu(), expected) for i, expected in pushed)


def test_an_id_is_never_used_twice(state: OffloadableLayerState, make_tensor: MakeTensor) -> None:
    ids: list[int] = []
    for _ in range(3):
        ids += [state.push_tensor(make_tensor()) for _ in range(4)]
        go_and_come_back(state)
        state.release_all_memory()
    assert all(type(i) is int for i in ids)
    assert len(set(ids)) == len(ids)
    for i in ids:
        with pytest.raises(RuntimeError):
            state.pop_tensor(i)


@pytest.mark.schedules("eager", why="the others run a copy when somebody waits for it")
def test_copies_run_on_the_given_stream_and_nobody_waits(
    device_module: Any, make_state: MakeState, make_tensor: MakeTensor, memory: Memory, link: Link
) -> None:
    stream = device_module.Stream()
    state = make_state(stream)
    start = memory.used()
    tensor = make_tensor()
    expected = tensor.cpu()
    i = state.push_tensor(tensor)
    del tensor
    link("2MB/s")  # a quarter of a second for each direction
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    assert memory.used() == start
    copied = stream.record_event()
    assert not copied.query(), "the copy is under way, and its memory is given up already"
    stream.synchronize()
    state.start_reload()
    copied = stream.record_event()
    tensor = state.pop_tensor(i)
    assert not copied.query(), "only the device waits for the copy"
    assert torch.equal(tensor.cpu(), expected)
