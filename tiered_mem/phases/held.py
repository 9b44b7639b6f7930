"""What of a module is on the device, storage by storage, and what has to stay there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import get_gradient_edge

from ..device.device import Device
from ..device.torch_private import part_here, storage_id, storage_uses, tensor_uses
from ..errors import OffloadRefused
from .placeholder import HostCopy, away, can_go
from .wrappers import Wrappers

# Where the host memory of a storage waits for the next cycle: on the storage. New gradients come with new storages,
# so that theirs waits on the parameter's.
_COPIES = "_tiered_mem_copies"
# How often DistributedDataParallel's reducer holds each of its parameters: in the list of all and in a bucket, and
# from a backward on either until the buckets are built anew, or for good.
_REDUCER_HOLDS = (2, 3)


@dataclass(slots=True, eq=False)
class ModuleTensor:
    """A tensor of a module, or what this process has of one.

    parameter: the parameter whose gradient it is, or this process's part of it.
    dtensor: the whole of which it is a part.
    """

    name: str
    tensor: torch.Tensor
    parameter: torch.Tensor | None = None
    dtensor: torch.Tensor | None = None

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> ModuleTensor:
        """Of a tensor or DTensor, which may be the gradient of a `parameter`."""
        if parameter is not None and (part := part_here(parameter)) is not None:
            parameter = part
        part = part_here(tensor) if can_go(tensor) or away(tensor) is not None else None
        return cls(name, tensor, parameter) if part is None else cls(name, part, parameter, tensor)

    def tensors(self) -> Iterator[torch.Tensor]:
        """What is away when it is."""
        yield self.tensor
        if self.dtensor is not None:
            yield self.dtensor


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


def members(module: torch.nn.Module, wrappers: Wrappers, *, gradients: bool) -> Iterator[ModuleTensor]:
    """The module's parameters, buffers and gradients; each tensor once. FSDP2's are as if nothing was gathered."""
    for name, registered in module.named_parameters():
        shard = wrappers.shards.get(id(registered))
        parameter = registered if shard is None else shard.sharded
        yield ModuleTensor.of(name, parameter)
        if shard is not None:
            yield ModuleTensor(name, shard.padded)
        if gradients and parameter.grad is not None:
            yield ModuleTensor.of(f"{name}.grad", parameter.grad, parameter)
    for name, buffer in module.named_buffers():
        yield ModuleTensor.of(name, buffer)


def held_storages(
    module: torch.nn.Module, wrappers: Wrappers, device: Device, *, gradients: bool
) -> list[HeldStorage]:
    """The module's storages that are on the device now. Raises OffloadRefused where a tensor has to stay there."""
    found = [member for member in members(module, wrappers, gradients=gradients) if _moves(member.tensor, device)]
    held = _together(found, device)
    # What FSDP2 gathers parameters in does not leave, but the graph of a forward has it until it is not needed.
    shards = ((name, wrappers.shards.get(id(registered))) for name, registered in module.named_parameters())
    gathered = [
        member
        for name, shard in shards
        for tensor in (() if shard is None else shard.gathered)
        if can_go((member := ModuleTensor.of(name, tensor)).tensor)
    ]
    _check_uses(held + _together(gathered, device), list(wrappers.reducers()), device)
    return held


def _together(found: Iterable[ModuleTensor], device: Device) -> list[HeldStorage]:
    """By storage, with what the tensors are views of."""
    present: dict[int, ModuleTensor] = {}
    for member in found:
        _check(member, device)
        if present.setdefault(id(member.tensor), member).dtensor is not member.dtensor:
            raise _shared(member, "two DTensors have the same part")
    for member in list(present.values()):
        base = member.tensor._base
        if base is not None and id(base) not in present:
            present[id(base)] = ModuleTensor(f"{member.name}._base", base)
            _check(present[id(base)], device)
    together: dict[int, list[ModuleTensor]] = {}
    for member in present.values():
        together.setdefault(storage_id(member.tensor.untyped_storage()), []).append(member)
    return [HeldStorage(lying) for lying in together.values()]


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
    elif any(each.grad_fn is not None for each in member.tensors()):
        reason = "autograd computed it, and its graph would be lost; detach() it"
    elif not device.plain_layout(tensor):
        reason = "it is in a private format of the NPU; torch_npu.npu_format_cast(tensor, 2) makes it a plain one"
    else:
        return
    raise OffloadRefused(f"{member.name} cannot be offloaded: {reason}")


def _check_uses(held: Iterable[HeldStorage], reducers: Iterable[Sequence[torch.Tensor]], device: Device) -> None:
    """Refuses storages that others use too: their memory would not come free, nor would others see it come back.

    reducers: tensors of which each is held as often as the others of its group, by what lets the module have them.
    """
    # What torch counts for an object of ours by itself is found by looking at one.
    alone = HeldStorage([ModuleTensor("", torch.empty(1, device=device.torch_device))])
    per_storage = alone.uses() - 1
    per_tensor = _uses(alone.carrier)
    by_reducers: dict[int, int] = {}
    for tensors in reducers:
        holds = min((_uses(tensor) for tensor in tensors if away(tensor) is None), default=0) - per_tensor
        by_reducers |= dict.fromkeys(map(id, tensors), holds if holds in _REDUCER_HOLDS else 0)
    for each in held:
        others = each.uses() - per_storage - len(each.members)
        if others > 0:
            raise _shared(each.members[0], f"{others} tensors that are not of the module use its memory")
        views = Counter(id(member.tensor._base) for member in each.members)
        for member in each.members:
            for tensor in member.tensors():
                # A gradient is held by its parameter. Of a DTensor's it is the whole, and not the part.
                is_gradient = member.parameter is not None and (member.dtensor is None or member.dtensor is tensor)
                known = per_tensor + views[id(tensor)] + is_gradient + by_reducers.get(id(tensor), 0)
                if _uses(tensor) > known:
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
