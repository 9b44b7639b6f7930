"""The device memory of a module, storage by storage, and whether it is the module's alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.autograd.graph import get_gradient_edge

from ..device.device import Device
from ..device.torch_private import storage_id, storage_uses, tensor_uses
from ..errors import OffloadRefused
from .placeholder import HostCopy, away, can_go

# Where the host memory of a storage waits for the next cycle: on the storage. New gradients come with new storages,
# so that theirs waits on the parameter's.
_COPIES = "_tiered_mem_copies"


@dataclass(slots=True, eq=False)
class ModuleTensor:
    """A tensor of a module. parameter: the parameter whose gradient it is."""

    name: str
    tensor: torch.Tensor
    parameter: torch.Tensor | None = None


class HeldStorage:
    """A storage, and the module's tensors in it: tied ones, or views of one flat buffer.

    carrier: the tensor in whose elements the bytes are counted. Trailing bytes short of an element are ignored.
    """

    def __init__(self, members: list[ModuleTensor]) -> None:
        self.storage = members[0].tensor.untyped_storage()
        self.members = members
        self.carrier = min((member.tensor for member in members), key=lambda tensor: tensor.itemsize)
        self.dtype = self.carrier.dtype
        self.nbytes = self.storage.nbytes() // self.dtype.itemsize * self.dtype.itemsize

    def uses(self) -> int:
        """The number of torch's references to the storage."""
        return storage_uses(storage_id(self.storage))

    def flat(self) -> torch.Tensor:
        """The whole storage as a 1-dimensional tensor."""
        return self.carrier.detach().as_strided((self.nbytes // self.dtype.itemsize,), (1,), 0)

    def kept(self) -> tuple[dict[int, HostCopy], int]:
        """Where host memory waits for the storage's next cycle, or for a gradient in its place; and its key there.

        The key is -1, and a gradient's is the offset of its parameter.
        """
        parameter = self.members[0].parameter
        if parameter is None:
            attributes, place = vars(self.storage), -1
        elif (known := away(parameter)) is not None:
            attributes, place = known.parked.marks, known.offset
        else:
            attributes, place = vars(parameter.untyped_storage()), int(parameter.storage_offset())
        copies: dict[int, HostCopy] = attributes.setdefault(_COPIES, {})
        return copies, place


def members(module: torch.nn.Module, *, gradients: bool) -> Iterator[ModuleTensor]:
    """The module's parameters, buffers and gradients; each tensor once."""
    for name, parameter in module.named_parameters():
        yield ModuleTensor(name, parameter)
        if gradients and parameter.grad is not None:
            yield ModuleTensor(f"{name}.grad", parameter.grad, parameter)
    for name, buffer in module.named_buffers():
        yield ModuleTensor(name, buffer)


def held_storages(module: torch.nn.Module, device: Device, *, gradients: bool) -> list[HeldStorage]:
    """The module's storages that are on the device now. Raises OffloadRefused where a tensor has to stay there."""
    found = [member for member in members(module, gradients=gradients) if _moves(member.tensor, device)]
    present = {id(member.tensor): member for member in found}
    for member in found:
        _check(member, device)
        base = member.tensor._base
        if base is not None and id(base) not in present:
            present[id(base)] = ModuleTensor(f"{member.name}._base", base)
            _check(present[id(base)], device)
    together: dict[int, list[ModuleTensor]] = {}
    for member in present.values():
        together.setdefault(storage_id(member.tensor.untyped_storage()), []).append(member)
    held = [HeldStorage(lying) for lying in together.values()]
    _check_uses(held, present, device)
    return held


def _moves(tensor: torch.Tensor, device: Device) -> bool:
    # A wrapper's own memory is none, so that it is not asked of a tensor whose type is not known.
    return (
        away(tensor) is None
        and device.owns(tensor)
        and not (can_go(tensor) and tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == 0)
    )


def _check(member: ModuleTensor, device: Device) -> None:
    tensor = member.tensor
    if not can_go(tensor):
        reason = f"it is a {type(tensor).__qualname__}, and only plain tensors and parameters can leave"
    elif tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        reason = "it is sparse, quantized or nested, and only dense tensors can leave"
    elif tensor.is_conj() or tensor.is_neg():
        reason = "it is a conjugate or negative view; resolve_conj() and resolve_neg() make a tensor of it"
    elif tensor.grad_fn is not None:
        reason = "autograd computed it, and its graph would be lost; detach() it"
    elif not device.plain_layout(tensor):
        reason = "it is in a private format of the NPU; torch_npu.npu_format_cast(tensor, 2) makes it a plain one"
    else:
        return
    raise OffloadRefused(f"{member.name} cannot be offloaded: {reason}")


def _check_uses(held: Iterable[HeldStorage], present: Mapping[int, ModuleTensor], device: Device) -> None:
    """Refuses storages that others use too: their memory would not come free, nor would others see it come back."""
    # What torch counts for an object of ours by itself is found by looking at one.
    alone = HeldStorage([ModuleTensor("", torch.empty(1, device=device.torch_device))])
    per_storage = alone.uses() - 1
    per_tensor = _uses(alone.carrier)
    views = Counter(id(member.tensor._base) for member in present.values())
    for each in held:
        others = each.uses() - per_storage - len(each.members)
        if others > 0:
            raise _shared(each.members[0], f"{others} tensors that are not of the module use its memory")
        for member in each.members:
            known = per_tensor + views[id(member.tensor)] + (member.parameter is not None)
            if _uses(member.tensor) > known:
                raise _shared(member, "something that is not of the module holds it")


def _uses(tensor: torch.Tensor) -> int:
    """The number of torch's references to the tensor, without the node that adds to its gradient."""
    if not tensor.requires_grad or tensor.is_inference():
        return tensor_uses(tensor)
    # The node may live or not, and it holds the tensor once. Here it lives.
    with torch.inference_mode(False):
        edge = get_gradient_edge(tensor)
    uses = tensor_uses(tensor) - 1
    del edge
    return uses


def _shared(member: ModuleTensor, found: str) -> OffloadRefused:
    return OffloadRefused(
        f"{member.name} cannot be offloaded: {found}, such as a view, a flat buffer, a wrapper like "
        "DistributedDataParallel, or the graph of a forward whose backward has not run. Let go of it first"
    )
