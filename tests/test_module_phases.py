"""manager.offload and manager.reload with modules."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.conftest import Link, MakeManager
from tests.models import backward, equal, same, stack, take_gradients
from tests.spilling import Spilling, Training
from tiered_mem import Closed, Offloaded, OffloadRefused, TieredMemError, TierFull, TieringManager
from tiered_mem.policies import LayerOrderPolicy

MIB = 1 << 20
SIDE = 512  # a square weight of that side is 1 MiB of float32


class Mixed(nn.Module):
    """Two square weights, one of them frozen, a small one, buffers of two types, and something on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIDE, SIDE)
        self.second = nn.Linear(SIDE, SIDE, bias=False).requires_grad_(False)
        self.register_buffer("scale", torch.rand(SIDE, dtype=torch.float64))
        self.register_buffer("steps", torch.tensor(3), persistent=False)
        self.register_buffer("nothing", torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x)) * self.scale.float()
        return y


def mixed(device: str) -> Mixed:
    torch.manual_seed(0)
    model = Mixed().to(device)
    model.register_buffer("elsewhere", torch.arange(5, device="meta" if device == "cpu" else "cpu"))
    return model


@pytest.fixture
def manager(make_manager: MakeManager) -> TieringManager:
    return make_manager(1)


@pytest.fixture
def no_room(device: str, device_module: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Inside, the device has no memory to give but what torch has already."""
    if device == "cpu":
        pytest.skip("the cpu has no limit")

    @contextlib.contextmanager
    def full() -> Iterator[None]:
        device_module.synchronize()
        device_module.empty_cache()
        device_module.set_per_process_memory_fraction(1e-4)
        try:
            yield
        finally:
            device_module.set_per_process_memory_fraction(1.0)

    return full


def contents(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items() if not tensor.is_meta}


def parked(manager: TieringManager) -> int:
    return int(manager.stats()["parked.bytes.current"])


def refusals(manager: TieringManager, module: nn.Module, **options: bool) -> str:
    """What an offload is refused with. Nothing may have changed."""
    before = contents(module)
    message = ""
    try:
        manager.offload(module, **options)
    except OffloadRefused as refused:
        message = str(refused)
    assert parked(manager) == 0
    assert same(contents(module), before)
    return message


# There and back.


def test_a_module_comes_back_bit_equal(manager: TieringManager, device: str) -> None:
    model = mixed(device)
    before, tensors = contents(model), [*model.parameters(), *model.buffers()]
    versions = [tensor._version for tensor in tensors]
    manager.offload(model)
    assert parked(manager) == 2 * MIB + SIDE * (4 + 8) + 8
    manager.reload(model)
    assert same(contents(model), before)
    for old, new in zip(tensors, [*model.parameters(), *model.buffers()], strict=True):
        assert old is new
        assert type(new) in (torch.Tensor, nn.Parameter)
    assert [tensor._version for tensor in tensors] == versions
    assert not model.second.weight.requires_grad
    assert model.elsewhere.device.type != device


def test_the_device_memory_is_free_when_offload_returns(
    manager: TieringManager, device: str, device_module: Any
) -> None:
    model = mixed(device)
    if device == "cpu":
        pytest.skip("torch does not count the cpu's memory")
    before = device_module.memory_allocated()
    manager.offload(model)
    away = device_module.memory_allocated()
    assert before - away >= 2 * MIB
    other = torch.ones(2 * MIB, dtype=torch.uint8, device=device)
    del other
    manager.reload(model)
    assert device_module.memory_allocated() == before


@pytest.mark.schedules("eager", why="it looks at which memory the allocator hands out")
def test_memory_that_is_free_is_not_read_any_more(manager: TieringManager, device: str, link: Link) -> None:
    """The copies have ended when the allocator hands the memory out again."""
    model = mixed(device)
    before, taken = contents(model), {p.data_ptr() for p in model.parameters()}
    link("100MB/s")
    manager.offload(model)
    others = [torch.full((SIDE, SIDE), 7.0, device=device) for _ in range(4)]
    assert taken & {other.data_ptr() for other in others}
    manager.reload(model)
    assert same(contents(model), before)


def test_work_before_and_after_is_ordered_with_the_copies(manager: TieringManager, device: str, link: Link) -> None:
    """On a slow link, with work that is still queued when the module leaves, and begins when it has come back."""
    link("200MB/s")
    layer = nn.Linear(SIDE, SIDE).to(device)
    x = torch.ones(4, SIDE, device=device)
    with torch.no_grad():
        for number in range(5):
            layer.weight.fill_(number)
            layer.weight.add_(1)
            manager.offload(layer)
            manager.reload(layer)
            y = functional.linear(x, layer.weight)
            layer.weight.mul_(2)
            assert torch.equal(y.cpu(), torch.full((4, SIDE), SIDE * (number + 1.0)))
            assert torch.equal(layer.weight.cpu(), torch.full((SIDE, SIDE), 2 * (number + 1.0)))


def test_an_offload_on_another_stream_waits_for_the_reload(
    manager: TieringManager, device: str, device_module: Any, link: Link
) -> None:
    layer = nn.Linear(SIDE, SIDE).to(device)
    before = contents(layer)
    manager.offload(layer)
    others = [torch.full((SIDE, SIDE), 7.0, device=device) for _ in range(4)]
    device_module.synchronize()
    del others
    link(h2d="50MB/s")
    manager.reload(layer)
    with device_module.stream(device_module.Stream()):
        manager.offload(layer)
    manager.reload(layer)
    assert same(contents(layer), before)


def test_a_trace_takes_phases(device: str) -> None:
    layer = nn.Linear(SIDE, SIDE).to(device)
    with TieringManager(policy="layer-order", device=device, host_bytes="8MiB", trace=True) as manager:
        manager.offload(layer)
        assert re.search(r"modules, offloaded now +2 storages, 1\.0 MiB\n", manager.memory_summary())
        manager.reload(layer)
        manager.synchronize()
        assert re.search(r"host memory for modules +1\.0 MiB\n", manager.memory_summary())
        assert re.search(r"reload copies +1\.0 MiB", manager.memory_summary())


def train(device: str, between: Callable[[nn.Module, int], None]) -> dict[str, torch.Tensor]:
    model, x = stack(3, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        loss = model(x)
        loss.backward()
        optimizer.step()
        between(model, step)
        optimizer.zero_grad()
    return contents(model)


def test_training_with_phases_is_bit_equal(make_manager: MakeManager, device: str) -> None:
    manager = make_manager(2)

    def away(model: nn.Module, step: int) -> None:
        manager.offload(model, gradients=step % 2 == 0)
        assert parked(manager) > 0
        manager.reload(model)

    assert same(train(device, away), train(device, lambda model, step: None))


def test_phases_and_offloaded_activations_share_a_manager(make_manager: MakeManager, device: str) -> None:
    manager = make_manager(2)
    model, x = stack(3, device)
    model(x).backward()
    expected = take_gradients(model)
    for _ in range(2):
        with manager.offload_context(model.layers, min_bytes=1024):
            loss = model(x)
        loss.backward()
        assert same(take_gradients(model), expected)
        manager.offload(model)
        manager.reload(model)


def test_another_model_may_be_away_meanwhile(manager: TieringManager, device: str) -> None:
    actor, critic = (nn.Linear(SIDE, SIDE).to(device) for _ in range(2))
    before = contents(actor), contents(critic)
    for _ in range(2):
        manager.offload(actor)
        manager.reload(critic)
        manager.offload(critic)
        manager.reload(actor)
    manager.reload(critic)
    assert same(contents(actor), before[0])
    assert same(contents(critic), before[1])


# Host memory.


def test_the_second_cycle_takes_the_same_host_memory(manager: TieringManager, device: str) -> None:
    model = mixed(device)
    x = torch.ones(2, SIDE, device=device)
    model(x).sum().backward()
    manager.offload(model, gradients=True)
    first = manager.stats()
    for _ in range(3):
        manager.reload(model)
        assert manager.stats()["host.used.current"] == first["host.used.current"]
        model.zero_grad()
        model(x).sum().backward()  # gradients in memory of their own
        manager.offload(model, gradients=True)
        now = manager.stats()
        assert all(now[name] == first[name] for name in ("host.slots", "host.used.current", "host.used.peak"))
    manager.reload(model)


def test_host_memory_is_given_back_when_the_module_dies(manager: TieringManager, device: str, no_gc: None) -> None:
    for phase in ("away", "back", "used while away"):
        layer = nn.Linear(SIDE, SIDE).to(device)
        manager.offload(layer)
        assert manager.stats()["host.slots"] == 2
        if phase == "used while away":
            with pytest.raises(Offloaded):
                layer(torch.ones(1, SIDE, device=device))
        if phase != "away":
            manager.reload(layer)
        del layer
        manager.synchronize()
        assert manager.stats()["host.slots"] == 0, phase


def test_a_full_host_tier_refuses_before_anything_moves(make_manager: MakeManager, device: str) -> None:
    manager = make_manager(1, host_bytes="16MiB")
    small, fitting, large = (nn.Linear(SIDE, n * SIDE, bias=False).to(device) for n in (1, 9, 17))
    manager.offload(small)
    with pytest.raises(TierFull, match=r"needed 17\.0 MiB, free 15\.0 MiB, used 1\.0 MiB, limit 16\.0 MiB"):
        manager.offload(large)
    several = nn.ModuleList([fitting, nn.Linear(SIDE, 7 * SIDE, bias=False).to(device)])
    with pytest.raises(TierFull, match=r"needed 16\.0 MiB.*nothing was offloaded"):
        manager.offload(several)
    assert parked(manager) == MIB
    assert manager.stats()["host.slots"] == 1
    manager.reload(small)
    manager.offload(fitting)
    manager.reload(fitting)


def test_activations_make_room_on_the_host_for_a_module(spilling: Spilling, training: Training) -> None:
    manager = spilling(LayerOrderPolicy(), 32 * MIB)
    weights = [torch.zeros(8 * MIB, dtype=torch.uint8, device=training.device) for _ in range(5)]
    resting = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights)
    weights.clear()
    loss = training.forward(manager)
    manager.synchronize()
    assert int(manager.stats()["host.used.current"]) > 8 * MIB
    with pytest.raises(TierFull):
        manager.offload(resting)
    assert manager.stats()["spilled.bytes.total"] == 0, "it can never fit, and so nothing makes room for it"
    fitting = nn.ParameterList(list(resting)[:3])
    manager.offload(fitting)
    assert int(manager.stats()["spilled.bytes.total"]) > 0
    loss.backward()
    assert training.is_right()
    manager.reload(fitting)


def test_a_closed_manager_refuses(make_manager: MakeManager, device: str) -> None:
    manager = make_manager(1)
    manager.close()
    with pytest.raises(Closed):
        manager.offload(nn.Linear(2, 2).to(device))


def test_only_modules_have_phases(manager: TieringManager) -> None:
    for call in (manager.offload, manager.reload):
        with pytest.raises(TypeError, match=r"or what register_optimizer returned, not list"):
            call([nn.Linear(2, 2)])  # type: ignore[arg-type]


# What is in a module.


def test_tied_weights_stay_tied(manager: TieringManager, device: str) -> None:
    model = nn.Module()
    model.embedding = nn.Embedding(SIDE, SIDE)
    model.head = nn.Linear(SIDE, SIDE, bias=False)
    model.head.weight = model.embedding.weight
    model.register_buffer("seen", model.head.weight.detach())  # another tensor, the same memory
    model.to(device)
    model.seen = model.head.weight.detach()
    before = contents(model)
    manager.offload(model)
    assert parked(manager) == MIB
    manager.reload(model)
    assert same(contents(model), before)
    assert model.head.weight is model.embedding.weight
    assert model.seen.data_ptr() == model.head.weight.data_ptr()


def test_views_of_one_flat_buffer_stay_views_of_one(manager: TieringManager, device: str) -> None:
    flat = torch.randn(3 * SIDE * SIDE, device=device)
    model = nn.Module()
    model.first = nn.Parameter(flat[: SIDE * SIDE].view(SIDE, SIDE).t())
    model.second = nn.Parameter(flat[2 * SIDE * SIDE :].view(SIDE, SIDE))
    model.register_buffer("bytes", flat.detach().view(torch.uint8)[8:20:2])
    model.register_buffer("broadcast", flat.detach()[:SIDE].expand(3, SIDE))
    assert "of the module use its memory" in refusals(manager, model)  # as long as `flat` lives
    before = contents(model)
    lying = [(t.size(), t.stride(), t.storage_offset()) for t in (*model.parameters(), *model.buffers())]
    del flat
    manager.offload(model)
    assert parked(manager) == 3 * MIB
    manager.reload(model)
    assert same(contents(model), before)
    tensors = [*model.parameters(), *model.buffers()]
    assert [(t.size(), t.stride(), t.storage_offset()) for t in tensors] == lying
    assert len({tensor.untyped_storage()._cdata for tensor in tensors}) == 1


def test_a_buffer_that_is_a_view_leaves_with_what_it_is_a_view_of(
    manager: TieringManager, device: str, device_module: Any
) -> None:
    model = nn.Module()
    model.register_buffer("table", torch.randn(SIDE, SIDE, device=device).cos()[None, :8])
    before = contents(model)
    manager.offload(model)
    assert parked(manager) == MIB
    manager.reload(model)
    assert same(contents(model), before)
    model.table.zero_()
    assert model.table._base.count_nonzero().item() == SIDE * (SIDE - 8)


def test_gradients_stay_unless_they_are_asked_for(manager: TieringManager, device: str) -> None:
    layer = nn.Linear(SIDE, SIDE).to(device)
    layer(torch.ones(2, SIDE, device=device)).sum().backward()
    assert layer.weight.grad is not None
    gradient = layer.weight.grad
    expected = gradient.cpu()
    manager.offload(layer)
    assert parked(manager) == MIB + 4 * SIDE
    assert torch.equal(gradient.cpu(), expected)
    manager.offload(layer, gradients=True)
    assert parked(manager) == 2 * (MIB + 4 * SIDE)
    with pytest.raises(Offloaded, match=r"weight\.grad of Linear is offloaded"):
        gradient.cpu()
    del gradient  # the parameter alone has it now
    manager.reload(layer)
    assert torch.equal(layer.weight.grad.cpu(), expected)
    assert parked(manager) == 0


def test_gradients_that_were_dropped_while_away(manager: TieringManager, device: str, no_gc: None) -> None:
    layer = nn.Linear(SIDE, SIDE).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(2, SIDE, device=device)).sum().backward()
    kept = layer.weight.grad
    assert kept is not None
    expected = kept.cpu()
    manager.offload(layer, gradients=True)
    optimizer.zero_grad()
    assert parked(manager) == 2 * MIB + 4 * SIDE  # the bias's gradient is gone
    manager.reload(layer)
    assert layer.weight.grad is None
    assert torch.equal(kept.cpu(), expected)


def test_inference_tensors_come_back_as_such(manager: TieringManager, device: str) -> None:
    with torch.inference_mode():
        layer = nn.Linear(SIDE, SIDE, device=device)
        x = torch.ones(2, SIDE, device=device)
        expected = layer(x).cpu()
        manager.offload(layer)
    manager.reload(layer)
    assert layer.weight.is_inference()
    with torch.inference_mode():
        assert torch.equal(layer(x).cpu(), expected)


def test_in_inference_mode_other_tensors_are_no_inference_tensors_afterwards(
    manager: TieringManager, device: str
) -> None:
    layer, x = nn.Linear(SIDE, SIDE).to(device), torch.ones(2, SIDE, device=device)
    expected = backward(layer(x).sum(), layer)
    with torch.inference_mode():
        manager.offload(layer)
        manager.reload(layer)
    assert not layer.weight.is_inference()
    assert equal(backward(layer(x).sum(), layer), expected)
    manager.offload(layer)
    with torch.inference_mode():
        manager.reload(layer)
        layer(x)
    assert equal(backward(layer(x).sum(), layer), expected)


def test_copies_of_a_module_that_was_away_know_nothing_of_it(manager: TieringManager, device: str) -> None:
    layer = nn.Linear(4, 4).to(device)
    manager.offload(layer)
    manager.reload(layer)
    before = contents(layer)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer.cpu()))):
        assert same(contents(other), before)
    del layer, other
    manager.synchronize()
    assert manager.stats()["host.slots"] == 0


# Again, and in parts.


def test_offload_and_reload_are_idempotent(manager: TieringManager, device: str) -> None:
    model = mixed(device)
    before = contents(model)
    manager.reload(model)
    assert same(contents(model), before)
    for _ in range(2):
        manager.offload(model)
    assert parked(manager) == 2 * MIB + SIDE * 12 + 8
    for _ in range(2):
        manager.reload(model)
        assert same(contents(model), before)


@pytest.mark.parametrize("inner_first", [True, False])
def test_a_part_may_go_before_the_whole_and_come_back_before_it(
    manager: TieringManager, device: str, inner_first: bool
) -> None:
    model = mixed(device)
    before = contents(model)
    manager.offload(model.first)
    assert parked(manager) == MIB + 4 * SIDE
    manager.offload(model)
    assert parked(manager) == 2 * MIB + SIDE * 12 + 8
    if inner_first:
        manager.reload(model.first)
        assert parked(manager) == MIB + SIDE * 8 + 8
        assert torch.equal(model.first.weight.cpu(), before["first.weight"])
    manager.reload(model)
    assert same(contents(model), before)


def test_a_module_that_only_holds_others_may_be_forgotten(manager: TieringManager, device: str) -> None:
    one, other = nn.Linear(8, 8).to(device), nn.Linear(8, 8).to(device)
    before = contents(one), contents(other)
    manager.offload(nn.ModuleList([one, other]))
    manager.reload(one)
    manager.reload(nn.ModuleList([other]))
    assert same(contents(one), before[0])
    assert same(contents(other), before[1])


def test_a_forgotten_manager_lives_as_long_as_something_is_away(device: str, no_gc: None) -> None:
    layer = nn.Linear(8, 8).to(device)
    before = contents(layer)
    manager = TieringManager(policy="layer-order", device=device, host_bytes="8MiB")
    manager.offload(layer)
    reference = weakref.ref(manager)
    del manager
    forgotten = reference()
    assert forgotten is not None
    forgotten.reload(layer)
    assert same(contents(layer), before)
    del forgotten
    assert reference() is None
    assert same(contents(layer), before)


def test_only_the_manager_that_has_a_module_brings_it_back(make_manager: MakeManager, device: str) -> None:
    one, other = make_manager(1), make_manager(1)
    layer = nn.Linear(8, 8).to(device)
    before = contents(layer)
    one.offload(layer)
    for call in (other.offload, other.reload):
        with pytest.raises(OffloadRefused, match="by another manager"):
            call(layer)
    one.reload(layer)
    other.offload(layer)
    assert one.stats()["host.slots"] == 0
    other.reload(layer)
    assert same(contents(layer), before)


# What is refused.


@pytest.mark.parametrize("operation", [functional.linear, torch.matmul, torch.mul], ids=lambda o: o.__name__)
def test_an_offload_between_forward_and_backward_is_refused(
    manager: TieringManager, device: str, operation: Callable[..., torch.Tensor]
) -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(8, 8, device=device))])
    x = torch.randn(8, 8, device=device, requires_grad=True)
    expected = backward(operation(x, model[0]).sum(), model, x)
    loss = operation(x, model[0]).sum()
    assert "whose backward has not run" in refusals(manager, model)
    assert equal(backward(loss, model, x), expected)
    manager.offload(model)  # `loss` is alive, and needs the weight no more
    manager.reload(model)


def test_a_buffer_that_a_graph_saved_is_refused(manager: TieringManager, device: str) -> None:
    model = nn.Module()
    model.register_buffer("scale", torch.randn(8, device=device))
    loss = (torch.ones(8, device=device, requires_grad=True) * model.scale).sum()
    assert "scale cannot be offloaded" in refusals(manager, model)
    loss.backward()
    manager.offload(model)
    manager.reload(model)


def test_a_backward_that_only_adds_to_a_gradient_is_refused(manager: TieringManager, device: str) -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(8, 8, device=device))])
    loss = (torch.ones(8, 8, device=device) + model[0]).sum()  # saves nothing
    manager.offload(model)
    with pytest.raises(Offloaded, match="0 of ParameterList is offloaded, and a backward computes its gradient"):
        loss.backward(retain_graph=True)
    manager.reload(model)
    loss.backward()
    assert model[0].grad is not None
    assert torch.equal(model[0].grad.cpu(), torch.ones(8, 8))


def test_a_weight_that_a_hook_kept_is_not_taken_for_an_empty_one(manager: TieringManager, device: str) -> None:
    """Nothing counts it, nothing of ours is asked for it, and (8, 1) would broadcast with (0,)."""
    scale = nn.ParameterList([nn.Parameter(torch.randn(8, 1, device=device), requires_grad=False)])
    x = torch.ones(8, 1, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        loss = (x * scale[0]).sum()
    manager.offload(scale)
    with pytest.raises(RuntimeError, match="must match the size"):
        loss.backward(retain_graph=True)
    manager.reload(scale)
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, scale[0])


def test_memory_that_others_use_is_refused(manager: TieringManager, device: str) -> None:
    layer = nn.Linear(8, 8).to(device)
    view = layer.weight.detach()[2:]  # and what it is a view of
    assert "weight cannot be offloaded: 2 tensors that are not of the module" in refusals(manager, layer)
    del view
    layer(torch.ones(8, device=device)).sum().backward()
    assert layer.bias.grad is not None
    views = [layer.bias.grad.view(-1)]
    assert "bias.grad cannot be offloaded" in refusals(manager, layer, gradients=True)
    views.clear()
    manager.offload(layer)
    manager.reload(layer)


def test_a_part_whose_memory_the_whole_uses_is_refused(manager: TieringManager, device: str) -> None:
    flat = torch.randn(16, device=device)
    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(2, 4, bias=False))
    for number, layer in enumerate(model):
        layer.weight = nn.Parameter(flat[8 * number :][:8].view(4, 2))
    del flat
    refusals(manager, model[0])
    before = contents(model)
    manager.offload(model)
    manager.reload(model[1])  # and what shares its memory
    assert same(contents(model), before)


class Subclass(torch.Tensor):
    """Some tensor of somebody's own."""


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (lambda t: t.as_subclass(Subclass), "it is a Subclass, and only plain tensors"),
        (lambda t: t.to(torch.complex64).conj(), "conjugate"),
        (lambda t: t.clone().requires_grad_() * 2, "autograd computed it"),
    ],
    ids=["subclass", "conjugate", "computed"],
)
def test_tensors_that_cannot_leave_are_refused(
    manager: TieringManager, device: str, tensor: Callable[[torch.Tensor], torch.Tensor], reason: str
) -> None:
    model = nn.Linear(4, 4).to(device)
    model.register_buffer("strange", tensor(torch.ones(4, device=device)))
    with pytest.raises(OffloadRefused, match=f"strange cannot be offloaded: .*{reason}"):
        manager.offload(model)
    assert parked(manager) == 0
    assert type(model.weight) is nn.Parameter


def test_a_parameter_without_a_shape_is_refused(manager: TieringManager, device: str) -> None:
    with pytest.raises(OffloadRefused, match="UninitializedParameter"):
        manager.offload(nn.LazyLinear(4).to(device))


def test_private_formats_are_refused(
    make_manager: MakeManager, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device != "npu":
        pytest.skip("only an NPU has them")
    monkeypatch.setattr("torch_npu.get_npu_format", lambda tensor: 29)
    assert "private format" in refusals(make_manager(1), nn.Linear(4, 4).to(device))


# Use of what is away.

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


# When the device is full.


def test_a_full_device_leaves_all_of_it_away(
    manager: TieringManager,
    device: str,
    device_module: Any,
    no_room: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(4 * SIDE, SIDE)).to(device)
    before = contents(model)
    manager.offload(model)
    little = torch.ones(2, device=device)  # torch has more memory of that kind, enough for the first layer
    nbytes, allocated = parked(manager), device_module.memory_allocated()
    with no_room():
        with pytest.raises(torch.OutOfMemoryError) as error:
            manager.reload(model)
        assert device_module.memory_allocated() == allocated
    assert parked(manager) == nbytes
    with pytest.raises(Offloaded):
        model[0](little)
    del error
    manager.reload(model)
    assert same(contents(model), before)


# When the manager is closed.


def test_close_brings_modules_back(make_manager: MakeManager, device: str) -> None:
    model = mixed(device)
    before = contents(model)
    manager = make_manager(1)
    manager.offload(model)
    manager.close()
    assert same(contents(model), before)
    manager.close()
    manager.reload(model)
    assert same(contents(model), before)
    assert manager.stats()["host.slots"] == 0


def test_what_the_device_has_no_room_for_at_close_can_be_brought_back_later(
    device: str, no_room: Callable[[], contextlib.AbstractContextManager[None]], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4 * SIDE, SIDE)).to(device)
    before = contents(model)
    manager = TieringManager(policy="layer-order", device=device, host_bytes="8MiB")
    manager.offload(model)
    with no_room():
        manager.close()
    assert "the device has no room for 4.0 MiB that were offloaded" in caplog.text
    with pytest.raises(Offloaded, match="its manager was closed when the device had no room for it"):
        model(torch.ones(4 * SIDE, device=device))
    manager.close()
    manager.reload(model)
    assert same(contents(model), before)


def test_the_errors_are_of_the_family() -> None:
    for error in (Offloaded, OffloadRefused):
        assert issubclass(error, TieredMemError)
        assert issubclass(error, RuntimeError)
