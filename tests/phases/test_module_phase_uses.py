"""Use of a module that is away is an error that names the tensor; what is known of it can be asked."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.models import same
from tests.phases.modules import contents
from tiered_mem import Offloaded, TieringManager

USES: dict[str, Callable[[nn.Linear, torch.Tensor], Any]] = {
    "forward": lambda layer, x: layer(x),
    "matmul": lambda layer, x: x @ layer.weight,
    "reversed matmul": lambda layer, x: torch.matmul(layer.weight, x.t()),
    "linear": lambda layer, x: functional.linear(x, layer.weight),
    "embedding": lambda layer, x: functional.embedding(x.long(), layer.weight),
    "out": lambda layer, x: torch.add(x, x, out=layer.weight.data),
    "in a list": lambda layer, x: torch.cat([x, layer.weight]),
    "foreach": lambda layer, x: torch._foreach_add_([layer.weight], [x]),
    "in place": lambda layer, x: x.add_(layer.weight),
    "data": lambda layer, x: layer.weight.data,
    "set data": lambda layer, x: setattr(layer.weight, "data", x),
    "set grad": lambda layer, x: setattr(layer.weight, "grad", x),
    "detach": lambda layer, x: layer.weight.detach(),
    "index": lambda layer, x: layer.weight[0],
    "item": lambda layer, x: layer.weight.tolist(),
    "numpy": lambda layer, x: layer.weight.__array__(),
    "pointer": lambda layer, x: layer.weight.data_ptr(),
    "storage": lambda layer, x: layer.weight.untyped_storage(),
    "dlpack": lambda layer, x: layer.weight.__dlpack__(),
    "compare": lambda layer, x: bool(layer.weight == x),
    "move": lambda layer, x: layer.cpu(),
    "cast": lambda layer, x: layer.half(),
    "state_dict": lambda layer, x: layer.state_dict(),
    "deepcopy": lambda layer, x: copy.deepcopy(layer),
    "copy": lambda layer, x: copy.copy(layer.weight),
    "pickle": lambda layer, x: pickle.dumps(layer),
    "norm": lambda layer, x: nn.utils.clip_grad_norm_(layer.parameters(), 1.0),
    "step": lambda layer, x: torch.optim.SGD(layer.parameters(), lr=0.1).step(),
}


@pytest.mark.parametrize("use", USES)
def test_use_of_an_offloaded_tensor_is_refused(manager: TieringManager, device: str, use: str) -> None:
    layer = nn.Linear(8, 8).to(device)
    before = contents(layer)
    x = torch.ones(8, 8, device=device)
    layer(x).sum().backward()
    manager.offload(layer, gradients=True)
    with pytest.raises(Offloaded, match=r"(weight|bias)(\.grad)? of Linear is offloaded: call manager\.reload"):
        USES[use](layer, x)
    manager.reload(layer)
    assert same(contents(layer), before)


def test_a_state_dict_is_not_loaded_into_what_is_away(manager: TieringManager, device: str) -> None:
    layer = nn.Linear(8, 8).to(device)
    before = contents(layer)
    manager.offload(layer)
    with pytest.raises(RuntimeError, match="weight of Linear is offloaded"):
        layer.load_state_dict(before)
    manager.reload(layer)


def test_what_is_known_of_a_tensor_can_be_asked(manager: TieringManager, device: str) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)).to(device)
    model(torch.ones(8, device=device)).sum().backward()
    manager.offload(model)
    weight = model[0].weight
    assert (weight.shape, weight.size(1), weight.stride(), weight.dim()) == ((4, 8), 8, (8, 1), 2)
    assert (weight.numel(), weight.nbytes, len(weight), weight.is_contiguous()) == (32, 128, 4, True)
    assert (weight.dtype, weight.device.type, weight.is_leaf) == (torch.float32, device, True)
    assert isinstance(weight, nn.Parameter)
    assert weight in {weight}
    assert str(weight) == "<0.weight of Sequential, torch.float32 of shape (4, 8), offloaded>"
    assert f"{weight:.0}" == ""
    assert "Linear(in_features=8" in repr(model)
    assert sum(p.numel() for p in model.parameters()) == 46
    assert weight.grad is not None
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.zero_grad()
    assert weight.grad is None
    model.eval().requires_grad_(False)
    manager.reload(model)
    assert not model[0].weight.requires_grad
