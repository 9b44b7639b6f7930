"""DefaultOffloadSynchronizer: when the layers of a forward leave the device and come back."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.cpu_offload.conftest import HOST_BYTES, KINDS, MIB, MakeTensor, Memory, moving, staying
from tests.cpu_offload.mxfp8 import bits, same_bits
from tiered_mem.cpu_offload import DefaultOffloadSynchronizer

pytestmark = pytest.mark.usefixtures("no_gc")

LAYERS = 10


@pytest.mark.parametrize("most_tensors", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_come_back_with_the_same_bits(
    make_tensor: MakeTensor, memory: Memory, kind: str, most_tensors: int
) -> None:
    start = memory.used()
    synchronizer = DefaultOffloadSynchronizer(
        num_layers=LAYERS, num_offloaded_layers=LAYERS - 1, host_bytes=HOST_BYTES
    )
    count = random.Random(0)
    for _ in range(3):
        layers: list[list[tuple[int, list[torch.Tensor]]]] = []
        for layer in range(LAYERS):
            assert synchronizer.fwd_step() == layer
            tensors = [make_tensor(kind) for _ in range(count.randint(1, most_tensors))]
            layers.append([(synchronizer.push_tensor(tensor), bits(tensor)) for tensor in tensors])
        del tensors
        for layer in reversed(range(LAYERS)):
            synchronizer.bwd_step(layer)
            for i, expected in layers.pop():
                tensor = synchronizer.pop_tensor(i)
                assert same_bits(bits(tensor), expected)
        synchronizer.finish_part_of_bwd()
        del tensor, i
        assert memory.used() == start
        assert synchronizer.get_offloaded_total_size_mb() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_one_layer_is_on_the_device_at_a_time(make_tensor: MakeTensor, memory: Memory, kind: str) -> None:
    synchronizer = DefaultOffloadSynchronizer(
        num_layers=LAYERS, num_offloaded_layers=LAYERS - 1, host_bytes=HOST_BYTES
    )
    like = make_tensor(kind)
    sizes, left = moving(like), memory.of(*staying(like))
    whole = memory.of(*sizes) + left
    del like
    start = memory.used()
    memory.forget_peak()
    ids = []
    for _ in range(LAYERS):
        synchronizer.fwd_step()
        tensor = make_tensor(kind)
        ids.append(synchronizer.push_tensor(tensor))
        del tensor
    after_forward = start + whole + (LAYERS - 1) * left
    assert memory.used() == after_forward
    assert synchronizer.get_offloaded_total_size_mb() == (LAYERS - 1) * sum(sizes) / MIB
    if kind == "plain":  # to quantize takes memory of its own
        assert memory.peak() == after_forward
    memory.forget_peak()
    for layer in reversed(range(LAYERS)):
        synchronizer.bwd_step(layer)
        tensor = synchronizer.pop_tensor(ids.pop())
        del tensor
    assert memory.peak() == after_forward, "a layer comes back only when the one after it is done"
    synchronizer.finish_part_of_bwd()
    assert memory.used() == start
    assert synchronizer.get_offloaded_total_size_mb() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_is_saved_thrice_moves_once(make_tensor: MakeTensor, memory: Memory, kind: str) -> None:
    synchronizer = DefaultOffloadSynchronizer(num_layers=2, num_offloaded_layers=1, host_bytes=HOST_BYTES)
    start = memory.used()
    x = make_tensor(kind)
    sizes, left = moving(x), memory.of(*staying(x))
    expected = bits(x)
    synchronizer.fwd_step()
    ids = [synchronizer.push_tensor(x) for _ in range(3)]
    assert same_bits(bits(x), expected)
    synchronizer.fwd_step()
    assert synchronizer.get_offloaded_total_size_mb() == sum(sizes) / MIB
    assert same_bits(bits(x), expected)
    del x
    assert memory.used() == start + left
    synchronizer.bwd_step(1)
    synchronizer.bwd_step(0)
    assert all(same_bits(bits(synchronizer.pop_tensor(i)), expected) for i in ids)
    assert memory.used() == start + memory.of(*sizes) + left
    synchronizer.finish_part_of_bwd()
    del ids
    assert memory.used() == start


def test_tensors_that_nobody_asks_for_are_released(make_tensor: MakeTensor, memory: Memory) -> None:
    synchronizer = DefaultOffloadSynchronizer(num_layers=4, num_offloaded_layers=2, host_bytes=HOST_BYTES)
    start = memory.used()
    for _ in range(4):
        synchronizer.fwd_step()
        synchronizer.push_tensor(make_tensor())
    for layer in reversed(range(4)):
        synchronizer.bwd_step(layer)
    synchronizer.finish_part_of_bwd()
    assert memory.used() == start
    assert synchronizer.get_offloaded_total_size_mb() == 0


def test_a_forward_without_backward_ends_with_the_next_one(make_tensor: MakeTensor, memory: Memory) -> None:
    synchronizer = DefaultOffloadSynchronizer(num_layers=4, num_offloaded_layers=2, host_bytes=HOST_BYTES)
    start = memory.used()
    for _ in range(3):
        layers = []
        for _ in range(4):
            synchronizer.fwd_step()
            tensor = make_tensor()
            layers.append((synchronizer.push_tensor(tensor), tensor.cpu()))
            del tensor
    assert memory.used() == start + 2 * memory.of(layers[0][1].nbytes)
    assert synchronizer.get_offloaded_total_size_mb() == 2 * layers[0][1].nbytes / MIB
    for layer in reversed(range(4)):
        synchronizer.bwd_step(layer)
        i, expected = layers.pop()
        assert torch.equal(synchronizer.pop_tensor(i).cpu(), expected)
    synchronizer.finish_part_of_bwd()
    del i
    assert memory.used() == start


def test_layers_that_are_not_offloaded_never_leave(make_tensor: MakeTensor) -> None:
    synchronizer = DefaultOffloadSynchronizer(num_layers=4, num_offloaded_layers=0, host_bytes=HOST_BYTES)
    pushed = []
    for _ in range(4):
        synchronizer.fwd_step()
        tensor = make_tensor()
        pushed.append((synchronizer.push_tensor(tensor), tensor.data_ptr()))
        del tensor
    assert synchronizer.get_offloaded_total_size_mb() == 0
    for layer in reversed(range(4)):
        synchronizer.bwd_step(layer)
        i, address = pushed[layer]
        assert synchronizer.pop_tensor(i).data_ptr() == address
    synchronizer.finish_part_of_bwd()


@pytest.mark.parametrize("generic", [True, False])
def test_work_of_the_given_stream_delays_the_copies(
    device: str, device_module: Any, make_tensor: MakeTensor, generic: bool
) -> None:
    """Streams are torch's or the device's own; the numbers are right either way."""
    stream = torch.Stream(device) if generic else device_module.Stream()
    synchronizer = DefaultOffloadSynchronizer(
        num_layers=2, num_offloaded_layers=1, offload_stream=stream, host_bytes=HOST_BYTES
    )
    tensor = make_tensor()
    expected = tensor.cpu()
    with stream:
        busy = torch.randn(512, 512).to(device)
        for _ in range(8):
            busy = busy @ busy
    synchronizer.fwd_step()
    i = synchronizer.push_tensor(tensor)
    del tensor
    synchronizer.fwd_step()
    others = [make_tensor().fill_(7) for _ in range(3)]
    synchronizer.bwd_step(1)
    synchronizer.bwd_step(0)
    assert torch.equal(synchronizer.pop_tensor(i).cpu(), expected)
    synchronizer.finish_part_of_bwd()
    del others


@pytest.mark.parametrize("retain", [True, False])
def test_iterations_with_other_sizes_have_their_own_numbers(make_tensor: MakeTensor, retain: bool) -> None:
    synchronizer = DefaultOffloadSynchronizer(4, 3, retain_pinned_cpu_buffers=retain, host_bytes=HOST_BYTES)
    for iteration in (0, 0, 1, 2, 0):
        layers = []
        for layer in range(4):
            synchronizer.fwd_step()
            tensors = [make_tensor(shape=(4 + iteration, 256, 256)) for _ in range(1 + (layer + iteration) % 3)]
            layers.append([(synchronizer.push_tensor(tensor), tensor.cpu()) for tensor in tensors])
            del tensors
        for layer in reversed(range(4)):
            synchronizer.bwd_step(layer)
            assert all(torch.equal(synchronizer.pop_tensor(i).cpu(), was) for i, was in layers[layer])
        synchronizer.finish_part_of_bwd()
