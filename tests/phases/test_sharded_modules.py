"""Modules under FSDP2 or DistributedDataParallel, and with DTensors, in a process group of this process alone."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.conftest import KIND
from tests.models import same
from tests.phases.modules import parked
from tiered_mem import Offloaded, OffloadRefused, TieringManager
from tiered_mem.policies import ManualPolicy

SIDE = 64


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    backend = "cpu:gloo" if KIND == "cpu" else f"cpu:gloo,{KIND}:{'nccl' if KIND == 'cuda' else 'hccl'}"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    gc.collect()  # of FSDP2's cycles, or their memory would come free in the tests of another file


@pytest.fixture
def manager(device: str) -> Iterator[TieringManager]:
    """Host memory waits for a model as long as that lives, which cycles of FSDP2's keep beyond the test."""
    with TieringManager(policy=ManualPolicy(), device=device, host_bytes="16MiB") as manager:
        yield manager


@pytest.fixture
def mesh(device: str) -> DeviceMesh:
    return DeviceMesh(device, [0])


class Block(nn.Module):
    """Two layers, the second one frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIDE, SIDE)
        self.second = nn.Linear(SIDE, SIDE).requires_grad_(False)
        self.register_buffer("scale", torch.full((SIDE,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x).relu()) * self.scale.to(x.dtype)
        return y


def plain(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(SIDE, SIDE)).to(device)


@pytest.fixture
def sharded(device: str, mesh: DeviceMesh) -> nn.Module:
    """A root with two groups in it, and parameters of its own."""
    model = plain(device)
    for block in model[:2]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch(device: str) -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * SIDE, device=device).view(4, SIDE)


def part(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def shards(model: nn.Module) -> dict[str, torch.Tensor]:
    """What this process has of the model's tensors and gradients, with nothing gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    named = dict(model.named_parameters()) | dict(model.named_buffers()) | gradients
    return {name: part(tensor) for name, tensor in named.items()}


def nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


# There and back.


@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
def test_an_fsdp2_model_comes_back_bit_equal(
    manager: TieringManager, device: str, sharded: nn.Module, trained: bool
) -> None:
    if trained:
        sharded(batch(device)).sum().backward()
    before, parameters = shards(sharded), list(sharded.parameters())
    gradients = [parameter.grad for parameter in parameters]
    manager.offload(sharded, gradients=True)
    manager.offload(sharded, gradients=True)
    assert parked(manager) == nbytes(before)
    manager.reload(sharded)
    manager.reload(sharded)
    assert same(shards(sharded), before)
    for old, new, gradient in zip(parameters, sharded.parameters(), gradients, strict=True):
        assert old is new
        assert type(new) is DTensor
        assert new.grad is gradient


def test_what_is_gathered_is_freed(manager: TieringManager, device: str, sharded: nn.Module) -> None:
    expected = sharded(batch(device)).detach()
    before = shards(sharded)
    for module in reversed(list(sharded.modules())):
        if isinstance(module, FSDPModule):
            module.unshard(async_op=True)
    manager.offload(sharded)
    assert parked(manager) == nbytes(before)
    for module in sharded.modules():
        for parameter in module.parameters(recurse=False):
            assert isinstance(parameter, DTensor)
            assert "offloaded" in repr(parameter)
    manager.reload(sharded)
    assert torch.equal(sharded(batch(device)), expected)


@pytest.mark.parametrize("wrap", ["fsdp2", "ddp", "ddp, views"])
def test_steps_between_phases_are_those_without(
    manager: TieringManager, device: str, mesh: DeviceMesh, wrap: str
) -> None:
    def trained(phases: bool) -> dict[str, torch.Tensor]:
        model = plain(device)
        if wrap == "fsdp2":
            fully_shard(model, mesh=mesh)
        else:
            model = DistributedDataParallel(model, gradient_as_bucket_view="views" in wrap, bucket_cap_mb=0.02)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for accumulated in range(6):
            model(batch(device)).square().mean().backward()
            if phases:
                with manager.away(model, gradients="views" not in wrap):
                    pass
            if accumulated % 2:
                optimizer.step()
                optimizer.zero_grad()
        return shards(model)

    assert same(trained(True), trained(False))


def test_gradients_stay_unless_they_are_wanted(manager: TieringManager, device: str, sharded: nn.Module) -> None:
    sharded(batch(device)).sum().backward()
    gradients = {name: part(p.grad) for name, p in sharded.named_parameters() if p.grad is not None}
    assert gradients
    manager.offload(sharded)
    assert {name: p.grad for name, p in sharded.named_parameters() if p.grad is not None}.keys() == gradients.keys()
    assert same({name: part(p.grad) for name, p in sharded.named_parameters() if p.grad is not None}, gradients)
    manager.offload(sharded, gradients=True)
    for parameter in sharded.parameters():
        if parameter.grad is not None:
            with pytest.raises(Offloaded, match=r"grad of .* is offloaded"):
                parameter.grad.add_(1)
    sharded.zero_grad()
    manager.reload(sharded)
    sharded(batch(device)).sum().backward()
    again = {name: part(p.grad) for name, p in sharded.named_parameters() if p.grad is not None}
    assert same(again, gradients)


def test_weights_may_be_replaced_when_they_are_back(
    manager: TieringManager, device: str, sharded: nn.Module
) -> None:
    """FSDP2 finds the memory of its shards where it is then."""
    sharded(batch(device))
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    zeros = {name: tensor.clone() for name, tensor in sharded.state_dict().items()}
    manager.offload(sharded)
    with pytest.raises(RuntimeError, match="is offloaded"):
        sharded.load_state_dict(zeros)
    manager.reload(sharded)
    for assign in (False, True):
        sharded.load_state_dict({name: torch.ones_like(each) for name, each in zeros.items()}, assign=assign)
        with manager.away(sharded):
            pass
        assert torch.equal(sharded(batch(device)), sharded(batch(device)))
        assert not torch.equal(part(sharded(batch(device))), torch.zeros(4, SIDE))
        assert all(bool((tensor == 1).all()) for tensor in shards(sharded).values())


def test_mixed_precision(manager: TieringManager, device: str, mesh: DeviceMesh) -> None:
    model = plain(device)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    manager.offload(model)
    with pytest.raises(Offloaded):
        model(batch(device))
    manager.reload(model)
    expected = model(batch(device)).detach()
    assert expected.dtype is torch.bfloat16
    with manager.away(model):
        pass
    assert torch.equal(model(batch(device)), expected)


def test_dtensors_without_a_wrapper(manager: TieringManager, device: str, mesh: DeviceMesh) -> None:
    model = nn.Linear(SIDE, SIDE).to(device)
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    model.register_buffer("tied", model.weight.detach())
    before = shards(model)
    manager.offload(model)
    for use in DTENSOR_USES:
        with pytest.raises(Offloaded, match=r"weight of Linear is offloaded"):
            use(model.weight)
    assert model.weight.shape == (SIDE, SIDE)
    assert model.weight.placements == (Shard(0),)
    manager.reload(model)
    assert same(shards(model), before)
    assert part(model.weight).data_ptr() != model.tied.to_local().data_ptr()
    assert model.weight.to_local().data_ptr() == model.tied.to_local().data_ptr()


DTENSOR_USES: list[Callable[[torch.Tensor], object]] = [
    lambda weight: weight + 1,
    lambda weight: weight.to_local(),  # type: ignore[operator]
    lambda weight: weight.full_tensor(),  # type: ignore[operator]
    lambda weight: weight.redistribute(weight.device_mesh, [Shard(1)]),  # type: ignore[operator, attr-defined]
    lambda weight: weight._local_tensor + 1,  # type: ignore[attr-defined]
    lambda weight: copy.deepcopy(weight),
    lambda weight: torch._foreach_add([weight], 1),
    lambda weight: torch.ops.aten.mul.Tensor(weight, weight),
]


# What is refused.


def test_a_forward_does_not_begin_while_a_part_is_away(
    manager: TieringManager, device: str, sharded: nn.Module
) -> None:
    """Else FSDP2 would be left in the middle of it."""
    expected = sharded(batch(device)).detach()
    manager.offload(sharded)
    manager.reload(sharded[2])
    with pytest.raises(Offloaded, match=r"0\.first\.weight of"):
        sharded(batch(device))
    manager.reload(sharded)
    assert torch.equal(sharded(batch(device)), expected)
    assert not any(
        hook for hook in sharded._forward_pre_hooks.values() if "gates" in getattr(hook, "__module__", "")
    )


def test_an_offload_between_forward_and_backward_is_refused(
    manager: TieringManager, device: str, sharded: nn.Module
) -> None:
    loss = sharded(batch(device)).sum()
    with pytest.raises(OffloadRefused, match="whose backward has not run"):
        manager.offload(sharded)
    assert parked(manager) == 0
    loss.backward()
    gradients = shards(sharded)
    sharded.zero_grad()
    sharded(batch(device)).sum().backward()
    assert same(shards(sharded), gradients)
    manager.offload(sharded)
    manager.reload(sharded)


def test_an_offload_in_the_middle_of_a_forward_is_refused(
    manager: TieringManager, device: str, sharded: nn.Module
) -> None:
    hook = sharded[1].first.register_forward_hook(lambda *_: manager.offload(sharded))
    with pytest.raises(OffloadRefused, match=r"reset_iter_state\(\)"):
        sharded(batch(device))
    hook.remove()
    with pytest.raises(OffloadRefused, match=r"reset_iter_state\(\)"):
        manager.offload(sharded)
    if not hasattr(sharded, "reset_iter_state"):
        return  # torch 2.11 has none, and the error says to make the model anew
    sharded.reset_iter_state()
    manager.offload(sharded)
    manager.reload(sharded)


def test_a_part_of_what_is_gathered_together_is_refused(
    manager: TieringManager, device: str, sharded: nn.Module
) -> None:
    for _ in range(2):
        with pytest.raises(OffloadRefused, match="weight cannot be offloaded"):
            manager.offload(sharded[0].first)
        assert parked(manager) == 0
        sharded[0].unshard()
    manager.offload(sharded[0])
    manager.reload(sharded)


def test_gradients_that_are_not_added_up_stay(manager: TieringManager, device: str, sharded: nn.Module) -> None:
    def accumulate(phases: bool) -> dict[str, torch.Tensor]:
        sharded.zero_grad()
        sharded.set_requires_gradient_sync(False)
        sharded(batch(device)).sum().backward()
        if phases:
            with pytest.raises(OffloadRefused, match="has not added them up"):
                manager.offload(sharded, gradients=True)
            assert parked(manager) == 0
            with manager.away(sharded):
                pass
        sharded.set_requires_gradient_sync(True)
        sharded(batch(device)).sum().backward()
        return shards(sharded)

    assert same(accumulate(True), accumulate(False))


def test_gradients_that_are_still_added_up_are_waited_for(
    manager: TieringManager, device: str, sharded: nn.Module
) -> None:
    """After a backward that is not the last one, only FSDP2's own streams know when they are there."""

    def accumulate(phases: bool) -> dict[str, torch.Tensor]:
        sharded.zero_grad()
        sharded.set_is_last_backward(False)
        sharded(batch(device)).sum().backward()
        if phases:
            with manager.away(sharded, gradients=True):
                pass
        sharded.set_is_last_backward(True)
        sharded(batch(device)).sum().backward()
        return shards(sharded)

    expected = accumulate(False)
    assert same(accumulate(True), expected)


def test_gradients_in_buckets_are_refused(manager: TieringManager, device: str) -> None:
    model = DistributedDataParallel(plain(device), gradient_as_bucket_view=True)
    model(batch(device)).sum().backward()
    with pytest.raises(OffloadRefused, match="gradient_as_bucket_view=True"):
        manager.offload(model, gradients=True)
    assert parked(manager) == 0
    manager.offload(model)
    model.zero_grad()
    manager.offload(model, gradients=True)
    with pytest.raises(Offloaded):
        model(batch(device))
    manager.reload(model)
    model(batch(device)).sum().backward()


def test_an_offload_between_ddp_forward_and_backward_is_refused(manager: TieringManager, device: str) -> None:
    model = DistributedDataParallel(plain(device))
    for _ in range(3):
        loss = model(batch(device)).sum()
        with pytest.raises(OffloadRefused, match="whose backward has not run"):
            manager.offload(model)
        assert parked(manager) == 0
        loss.backward()
        manager.offload(model)
        manager.reload(model)
