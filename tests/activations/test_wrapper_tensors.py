"""Saved tensors that are made of other tensors: they come back as what they were, and their parts move."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from tests.conftest import MakeManager
from tests.models import Stack, equal, is_empty
from tiered_mem import ChangedTensor, TieringManager

pytestmark = pytest.mark.usefixtures("no_gc")

ROWS, WIDTH = 64, 32
NBYTES = ROWS * WIDTH * 4


class Scaled(torch.Tensor):
    """Stands for `data * scale`. Operations see the product; only detach and in-place changes see the parts."""

    data_part: torch.Tensor
    scale: torch.Tensor | None

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor | None, note: str) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor | None, note: str) -> None:
        self.data_part, self.scale, self.note = data, scale, note

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["data_part"] + ["scale"] * (self.scale is not None), self.note

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], note: str, size: object, stride: object) -> Scaled:
        return Scaled(parts["data_part"], parts.get("scale"), note)

    def product(self) -> torch.Tensor:
        return self.data_part if self.scale is None else self.data_part * self.scale

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            (whole,) = args
            return cls(whole.data_part, whole.scale, whole.note)
        if func is torch.ops.aten.add_.Tensor:
            args[0].data_part.add_(args[1])
            return args[0]
        plain = [arg.product() if isinstance(arg, Scaled) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


class MultiplyBy(torch.autograd.Function):
    """x * wrapper.product(), which saves the wrappers alone. `check` sees them when they come back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, check: Any, *wrappers: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*wrappers)
        ctx.check = check
        for wrapper in wrappers:
            x = x * wrapper.product()
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        for wrapper in ctx.saved_tensors:
            ctx.check(wrapper)
            gradient = gradient * wrapper.product()
        return gradient, None, *[None] * len(ctx.saved_tensors)


class Multiply(nn.Module):
    """Makes wrappers of its input in each forward, and saves them."""

    def __init__(self, kind: str, wrapper: type[Scaled] = Scaled) -> None:
        super().__init__()
        self.kind = kind
        self.wrapper = wrapper

    def wrappers(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        data, scale = x.detach() * 3, x.detach()[:, :1] * 2 + 1
        match self.kind:
            case "two parts":
                return [self.wrapper(data, scale, "first")]
            case "one part":
                return [self.wrapper(data, None, "first")]
            case "shared part":
                return [self.wrapper(data, None, "first"), self.wrapper(data, data * 2, "first")]
            case "part of a part":
                return [self.wrapper(self.wrapper(data, scale, "inner"), data * 2, "first")]
            case _:
                whole = torch.cat([data, data])
                return [self.wrapper(whole[ROWS // 2 : ROWS // 2 + ROWS].t().contiguous().t(), None, "first")]

    def check(self, wrapper: Any) -> None:
        assert type(wrapper) is self.wrapper
        assert wrapper.note == "first"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return MultiplyBy.apply(x, self.check, *self.wrappers(x))


def backward(loss: torch.Tensor, *owners: nn.Module | torch.Tensor) -> list[torch.Tensor]:
    """Runs backward. The gradients, of DTensors their local part; afterwards there are none."""
    loss.backward()
    every = [leaf for o in owners for leaf in (o.parameters() if isinstance(o, nn.Module) else (o,))]
    leaves = [leaf for leaf in every if leaf.requires_grad]
    gradients = [leaf.grad.to_local() if isinstance(leaf.grad, DTensor) else leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return gradients


def steps_are_same(manager: TieringManager, layer: nn.Module, x: torch.Tensor) -> int:
    """Two steps in a context have the gradients of a plain one. Returns the bytes that moved in a step."""
    expected = backward(layer(x * 1).sum(), layer, x)
    offload = manager.offload_context([layer], min_bytes=1024)
    for step in range(1, 3):
        with offload:
            loss = layer(x * 1).sum()
        moved = int(manager.stats()["offloaded.bytes.total"])
        assert moved % step == 0
        assert equal(backward(loss, layer, x), expected)
        del loss
    return moved // 2


@pytest.fixture
def x(device: str) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH).to(device).requires_grad_()


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [
        ("two parts", NBYTES),  # the scale is small and stays
        ("one part", NBYTES),
        ("shared part", 2 * NBYTES),  # data and data * 2: the first one is in two wrappers
        ("part of a part", 2 * NBYTES),
        ("views", NBYTES),
    ],
)
def test_a_wrapper_comes_back_as_what_it_was(
    make_manager: MakeManager, x: torch.Tensor, kind: str, nbytes: int
) -> None:
    assert steps_are_same(make_manager(), Multiply(kind), x) == nbytes


def test_the_wrapper_itself_is_left_as_it_is(make_manager: MakeManager, x: torch.Tensor) -> None:
    layer = Multiply("two parts")
    wrapper = Scaled(x.detach() * 3, x.detach() + 1, "first")
    parts = wrapper.data_part, wrapper.scale
    layer.wrappers = lambda x: [wrapper]  # type: ignore[method-assign]
    assert steps_are_same(make_manager(), layer, x) == 2 * NBYTES
    assert wrapper.data_part is parts[0]
    assert wrapper.scale is parts[1]


def test_a_part_that_is_also_saved_by_itself_moves_once(make_manager: MakeManager, x: torch.Tensor) -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            z = y * y.detach().sigmoid()  # saves both factors
            return MultiplyBy.apply(z, lambda wrapper: None, Scaled(y.detach(), None, "first"))

    assert steps_are_same(make_manager(), Both(), x) == 2 * NBYTES


def test_a_wrapper_around_a_weight_moves_nothing(make_manager: MakeManager, x: torch.Tensor) -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(ROWS, WIDTH), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wrapper = Scaled(self.weight.detach(), self.weight.data[:, :1], "first")
            return MultiplyBy.apply(x, lambda wrapper: None, wrapper)

    assert steps_are_same(make_manager(), Weighted().to(x.device), x) == 0


def test_a_wrapper_gives_up_its_device_memory(
    device_module: Any, make_manager: MakeManager, x: torch.Tensor
) -> None:
    layer = Multiply("part of a part")
    before = device_module.memory_allocated()
    with make_manager().offload_context([layer], min_bytes=1024):
        y = layer(x)
    scale = ROWS * 4  # small, and it stays
    assert device_module.memory_allocated() - before == pytest.approx(y.nbytes + scale, abs=1024)
    y.sum().backward()


@pytest.mark.usefixtures("careless")
@pytest.mark.parametrize("num_layers", [0, 1])
def test_a_wrapper_that_was_changed_is_refused(make_manager: MakeManager, x: torch.Tensor, num_layers: int) -> None:
    layer = Multiply("one part")
    seen: list[torch.Tensor] = []

    def wrappers(x: torch.Tensor) -> list[torch.Tensor]:
        seen.append(Scaled(x.detach() * 3, None, "first"))
        return seen

    layer.wrappers = wrappers  # type: ignore[method-assign]
    with make_manager(num_layers).offload_context([layer], min_bytes=1):
        loss = layer(x).sum()
        seen[0].add_(1)
    with pytest.raises(ChangedTensor, match=rf"\({ROWS}, {WIDTH}\)"):
        loss.backward()


class Waiting(Scaled):
    """A collective is still filling it: whoever reads its parts must wait first."""

    def trigger_wait(self) -> torch.Tensor:
        raise NotImplementedError


def test_a_wrapper_that_is_still_being_filled_stays(make_manager: MakeManager, x: torch.Tensor) -> None:
    assert steps_are_same(make_manager(), Multiply("one part", Waiting), x) == 0


class Plain(torch.Tensor):
    """A subclass that says nothing of how it is made."""


def test_a_subclass_without_a_protocol_comes_back_right(make_manager: MakeManager, x: torch.Tensor) -> None:
    class Subclassed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.as_subclass(Plain)
            return (y.sigmoid() * y).as_subclass(torch.Tensor)

    # sigmoid saves its output before that is one of the subclass; what the product saves stays.
    assert steps_are_same(make_manager(), Subclassed(), x) == NBYTES


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        dist.init_process_group("cpu:gloo", rank=0, world_size=1, init_method=rendezvous)
        yield
        dist.destroy_process_group()


@pytest.fixture
def mesh(device: str, one_process: None) -> DeviceMesh:
    return DeviceMesh(device, [0])


def distribute(tensor: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return DTensor.from_local(tensor, mesh, [placement], run_check=False)


class Saves(torch.autograd.Function):
    """2 * x, which saves a DTensor that it makes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> torch.Tensor:
        ctx.save_for_backward(distribute(x * 2, mesh, placement))
        ctx.expected = mesh, (placement,), x.shape
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (saved,) = ctx.saved_tensors
        assert type(saved) is DTensor
        assert (saved.device_mesh, saved.placements, saved.shape) == ctx.expected
        assert not saved.requires_grad
        return gradient * saved.to_local(), None, None


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
def test_a_dtensor_of_a_function_keeps_its_placements(
    make_manager: MakeManager, x: torch.Tensor, mesh: DeviceMesh, placement: Placement
) -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Saves.apply(x, mesh, placement)

    assert steps_are_same(make_manager(), Layer(), x) == NBYTES


class Parallel(nn.Module):
    """A linear layer over DTensors, with weights that are such too."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        weight = torch.randn(WIDTH, WIDTH).to(mesh.device_type)
        self.weight = nn.Parameter(distribute(weight, mesh, Replicate()))
        self.bias = nn.Parameter(distribute(weight[0].clone(), mesh, Replicate()))
        self.register_buffer("mask", distribute(weight.gt(0).float(), mesh, Replicate()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = distribute(x, self.mesh, Shard(0))
        y = nn.functional.linear(y, self.weight, self.bias).tanh() @ self.mask
        return (y * y.detach()).to_local()


def test_dtensors_in_ordinary_operations(make_manager: MakeManager, x: torch.Tensor, mesh: DeviceMesh) -> None:
    """Its input, the output of tanh and that of the product move; weights, their transposes and the mask stay."""
    torch.manual_seed(0)
    assert steps_are_same(make_manager(), Parallel(mesh), x) == 3 * NBYTES


@pytest.mark.usefixtures("careless")
def test_a_dtensor_that_was_changed_is_refused(
    make_manager: MakeManager, x: torch.Tensor, mesh: DeviceMesh
) -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = distribute(x, mesh, Shard(0)).sigmoid()
            return y.add_(1).to_local()

    layer = Layer()
    with make_manager().offload_context([layer], min_bytes=1):
        loss = layer(x * 1).sum()
    with pytest.raises(ChangedTensor, match=rf"\({ROWS}, {WIDTH}\)"):
        loss.backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_layer_between_dtensors(
    make_manager: MakeManager, x: torch.Tensor, mesh: DeviceMesh, use_reentrant: bool
) -> None:
    torch.manual_seed(0)
    layer = Parallel(mesh)

    def forward() -> torch.Tensor:
        return checkpoint(layer, x * 1, use_reentrant=use_reentrant).sum()

    expected = backward(forward(), layer, x)
    manager = make_manager()
    with manager.offload_context([layer], min_bytes=1024):
        loss = forward()
    assert manager.stats()["offloaded.bytes.total"] == NBYTES
    assert equal(backward(loss, layer, x), expected)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("reshard", [True, False])
def test_a_fully_sharded_model(reshard: bool) -> None:
    """On the CPU: its weights are DTensors between the steps and plain tensors while a layer runs."""
    torch.manual_seed(0)
    model, x = Stack(3, 16), torch.randn(32, 16, requires_grad=True)
    mesh = DeviceMesh("cpu", [0])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    expected = backward(model(x), model, x)
    with TieringManager(policy="layer-order", device="cpu", host_bytes="16MiB") as manager:
        offload = manager.offload_context(model.layers, min_bytes=1)
        for _ in range(3):
            with offload:
                loss = model(x)
            assert int(manager.stats()["offloaded.blocks.total"]) > 0
            assert equal(backward(loss, model, x), expected)
            del loss
        assert manager.stats()["reloads_on_demand.total"] == 0
        assert is_empty(manager)
