"""Tensors that are changed in place after they were saved: refused, or right."""

from __future__ import annotations

import pytest
import torch

from tests.activations.saving import Apply, leaf
from tests.conftest import MakeManager
from tests.models import same, stack, take_gradients
from tests.service import Service, make_tensor, view_of_all
from tiered_mem import ChangedTensor
from tiered_mem.policies import Offload, Release

pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.mark.parametrize("num_layers", [0, 2])
def test_a_saved_tensor_that_was_changed_is_refused(
    device: str, make_manager: MakeManager, num_layers: int
) -> None:
    """Autograd itself refuses this, and hooks switch its check off. The gradient would be silently wrong."""
    layers = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    x = torch.randn(64, 64).to(device).requires_grad_()
    with make_manager(num_layers).offload_context(layers, min_bytes=1024):
        with torch.no_grad():
            layers[1](x)  # layers are known by their calls
        y = _square_in_layer(layers[0], x + 1)
    with pytest.raises(ChangedTensor, match=r"\(64, 64\)"):
        y.sum().backward()


def _square_in_layer(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    results: list[torch.Tensor] = []

    def square(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        results.append(inputs[0] * inputs[0])
        inputs[0].add_(1)

    handle = layer.register_forward_hook(square, prepend=True)
    layer(x)
    handle.remove()
    return results[0]


def test_a_change_after_the_release_does_no_harm(device: str, make_manager: MakeManager) -> None:
    """By then the contents are safe on the host: the right gradient, where plain autograd gives an error."""
    model, x = stack(2, device)
    x.requires_grad_()
    model(x).backward()
    expected, expected_input = take_gradients(model), x.grad.cpu()
    x.grad = None
    y = x.detach().clone().requires_grad_()
    copied = y * 1
    with make_manager().offload_context(model.layers, min_bytes=1024):
        loss = model(copied)
    copied.detach().zero_()
    loss.backward()
    assert same(take_gradients(model), expected)
    assert torch.equal(y.grad.cpu(), expected_input)


class Change(torch.nn.Module):
    """Saves `y * y`'s input, here called output 0 of MulBackward0, and changes it at the moment of choice."""

    def __init__(self, inside: bool, rows: int) -> None:
        super().__init__()
        self.inside = inside
        self.rows = rows
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * 3)[: self.rows] * 2
        z = y * y
        self.seen = y.detach()
        if self.inside:
            y.detach().add_(1)
        return z


WHAT = r"saved torch.float32 tensor of shape \({rows}, 96\), output 0 of MulBackward0, was changed in place"


@pytest.mark.usefixtures("careless")
@pytest.mark.parametrize(
    ("num_layers", "min_bytes", "inside", "rows"),
    [
        (0, 1, True, 64),
        (0, 1, False, 64),
        (2, 1, True, 64),
        (1, 1, False, 64),
        (2, 1 << 20, True, 64),
        (2, 1 << 20, False, 64),
        (0, 1, False, 2),
    ],
    ids=["kept", "kept_later", "before_offload", "after_offload", "small", "small_later", "slice_later"],
)
def test_the_error_names_the_tensor_that_was_changed(
    device: str, make_manager: MakeManager, num_layers: int, min_bytes: int, inside: bool, rows: int
) -> None:
    x = leaf(device)
    layer, last = Change(inside, rows), torch.nn.Identity()
    with make_manager(num_layers).offload_context([layer, last], min_bytes=min_bytes):
        y = layer(x)
        if not inside and layer.seen is not None:
            layer.seen.add_(1)
        loss = last(y).sum()
    with pytest.raises(ChangedTensor, match=WHAT.format(rows=rows)):
        loss.backward()
    layer.seen = None


def test_sigmoid_whose_output_is_changed_is_refused(device: str, make_manager: MakeManager) -> None:
    x = leaf(device)
    layer = Apply(lambda x: x.sigmoid().add_(1))
    with make_manager().offload_context([layer], min_bytes=1):
        loss = layer(x).sum()
    with pytest.raises(ChangedTensor, match="output 0 of SigmoidBackward0"):
        loss.backward()


@pytest.mark.usefixtures("careless")
def test_what_was_saved_outside_of_the_layers_is_guarded_too(device: str, make_manager: MakeManager) -> None:
    x = leaf(device)
    layer = torch.nn.Identity()
    for change in ("before the layer", "after it"):
        with make_manager().offload_context([layer], min_bytes=1):
            y = x * 2
            z = y.square()
            if change == "before the layer":
                y.detach().add_(1)
            layer(y)  # a layer's input is its own, though it was saved before it
            if change == "after it":
                y.detach().add_(1)
            loss = z.sum()
        with pytest.raises(ChangedTensor, match=r"shape \(64, 96\), output 0 of MulBackward0"):
            loss.backward()


@pytest.mark.usefixtures("careless")
def test_a_change_between_the_copy_and_the_release_is_refused(device: str, service: Service) -> None:
    """What reached the host may be the new contents."""
    tensor = make_tensor(device)
    view = view_of_all(tensor)
    block = service.save(tensor)
    service.do(Offload(block.key))
    tensor.add_(1)
    service.do(Release(block.key))
    with pytest.raises(ChangedTensor, match="changed in place"):
        service.manager._activations.load(block, view)
    service.let_go(block)


def test_a_change_of_what_was_loaded_is_refused_at_the_next_load(device: str, service: Service) -> None:
    tensor = make_tensor(device)
    view = view_of_all(tensor)
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key))
    service.do(Release(block.key))
    service.manager._activations.load(block, view).add_(1)
    with pytest.raises(ChangedTensor, match="changed in place"):
        service.manager._activations.load(block, view)
    service.let_go(block)


def test_new_contents_are_a_new_block(device: str, service: Service) -> None:
    """The same storage, saved before and after a change: the first save is refused, the second is right."""
    tensor = make_tensor(device)
    view = view_of_all(tensor)
    old = service.save(tensor)
    tensor.add_(1)
    new = service.save(tensor)
    expected = tensor.cpu()
    del tensor
    for block in (old, new):
        service.do(Offload(block.key))
        service.do(Release(block.key))
    assert torch.equal(service.manager._activations.load(new, view).cpu(), expected)
    with pytest.raises(ChangedTensor):
        service.manager._activations.load(old, view)
    service.let_go(old)
    service.let_go(new)
