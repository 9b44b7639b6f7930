"""Which step releases a layer's device memory and which one brings it back, read from the device's memory."""

from __future__ import annotations

import pytest
import torch

from tests.cpu_offload.conftest import HOST_BYTES, LEAST_ELEMENTS, Memory
from tiered_mem.cpu_offload import DefaultOffloadSynchronizer

pytestmark = pytest.mark.usefixtures("no_gc")


def tensor_of(layer: int, device: str) -> torch.Tensor:
    """Each layer's has a size of its own, so that it is known by what comes and goes."""
    return torch.full((LEAST_ELEMENTS + 4096 * layer,), float(layer), dtype=torch.bfloat16, device=device)


@pytest.mark.parametrize(("layers", "offloaded"), [(5, 2), (10, 6), (10, 9), (4, 1), (4, 0), (2, 1)])
def test_layer_i_leaves_at_step_n_minus_k_plus_i_and_comes_back_one_step_earlier(
    device: str, memory: Memory, layers: int, offloaded: int
) -> None:
    size = [memory.of(tensor_of(layer, device).nbytes) for layer in range(layers)]
    released_by = {layers - offloaded + i: i for i in range(offloaded)}
    reloaded_by = {layers - 1 - offloaded + i: i for i in range(offloaded)}
    synchronizer = DefaultOffloadSynchronizer(
        num_layers=layers, num_offloaded_layers=offloaded, host_bytes=HOST_BYTES
    )
    for _ in range(2):
        ids = []
        for layer in range(layers):
            before = memory.used()
            assert synchronizer.fwd_step() == layer
            gone = size[released_by[layer]] if layer in released_by else 0
            assert memory.used() == before - gone, f"released by fwd_step({layer})"
            tensor = tensor_of(layer, device)
            ids.append(synchronizer.push_tensor(tensor))
            del tensor
        before = memory.used()
        for layer in reversed(range(layers)):
            synchronizer.bwd_step(layer)
            come = size[reloaded_by[layer]] if layer in reloaded_by else 0
            done = size[layer + 1] if layer + 1 < layers else 0
            assert memory.used() == before + come - done, f"reloaded by bwd_step({layer})"
            before = memory.used()
            tensor = synchronizer.pop_tensor(ids.pop())
            assert torch.equal(tensor, tensor_of(layer, device))
            del tensor
        synchronizer.finish_part_of_bwd()
        assert memory.used() == before - size[0]
