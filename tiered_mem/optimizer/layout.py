"""What an optimizer keeps for a parameter, and how the tensors in it lie in the bytes of a bucket."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence, Set
from copy import copy
from typing import Any, NamedTuple

import torch

from ..device.device import Device
from ..device.torch_private import AsPlainTensors, as_dtensor, storage_id
from ..ground.wrappers import Rebuild, copied, plain_tensors, take_apart

Param = torch.Tensor
State = dict[Any, Any]
# The keys and indices that lead to a value.
Path = tuple[Hashable, ...]

# The caching allocators hand out memory at such addresses, and kernels may rely on it.
_ALIGNMENT = 512


class Field(NamedTuple):
    """One tensor of a state, plain or a wrapper, as a DTensor is.

    path: where it is in the state. parts: the plain tensors that it consists of. rebuild: makes a wrapper of them;
    None for a plain tensor. kind: differs between wrappers that `rebuild` does not make of one another's parts.
    """

    path: Path
    parts: tuple[Part, ...]
    rebuild: Rebuild | None
    kind: object

    def after(self, start: int) -> Field:
        """The same, so many bytes further on."""
        return self._replace(parts=tuple(part._replace(offset=part.offset + start) for part in self.parts))

    @property
    def span(self) -> tuple[int, int]:
        """Where its bytes begin and end, in the bucket."""
        return self.parts[0].offset, self.parts[-1].end

    def describes(self, pieces: Pieces) -> bool:
        """Whether they are of such a tensor."""
        found = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in pieces.tensors]
        return pieces.kind == self.kind and found == [(part.dtype, part.shape, part.stride) for part in self.parts]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor over a bucket's bytes, 1-dimensional uint8 of any device."""
        tensors = [part.of(flat) for part in self.parts]
        return tensors[0] if self.rebuild is None else self.rebuild(tensors)


class Part(NamedTuple):
    """A plain tensor without gaps; `offset` and `nbytes` are those of its bytes in the bucket."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor over a bucket's bytes, which are all of its storage: torch saves no two types of one."""
        start = int(flat.storage_offset()) + self.offset
        storage = flat.untyped_storage()[start : start + self.nbytes]
        empty = torch.empty(0, dtype=self.dtype, device=flat.device)
        return empty.set_(storage, 0, self.shape, self.stride)

    @property
    def end(self) -> int:
        """Where the next part may begin."""
        return self.offset + _padded(self.nbytes)


def fields_of(param: Param, state: Mapping[Any, Any], split: Splitter, start: int) -> tuple[Field, ...]:
    """Where the tensors of a parameter's state that can move are to lie, from byte `start` on."""
    fields = []
    for path, value in leaves(state):
        pieces = pieces_of(param, value, split)
        if pieces is None:
            continue
        parts = []
        for piece in pieces.tensors:
            parts.append(Part(start, piece.nbytes, piece.dtype, piece.shape, piece.stride()))
            start = parts[-1].end
        fields.append(Field(path, tuple(parts), pieces.rebuild, pieces.kind))
    return tuple(fields)


class StateLayout(NamedTuple):
    """What a parameter's state takes in a bucket: the fields, from its beginning on, and `room` bytes."""

    fields: tuple[Field, ...]
    room: int


def layout_of(param: torch.Tensor, state: Mapping[Any, Any], split: Splitter) -> StateLayout:
    """That of a state. Keeps none of its tensors."""
    fields = fields_of(param, state, split, 0)
    return StateLayout(fields, _room_for(param, state, fields, split.device))


def _room_for(param: torch.Tensor, state: Mapping[Any, Any], fields: Sequence[Field], device: Device) -> int:
    """Of a DTensor, the bytes in the process that has most of it.

    All processes come to the same number, even one whose part of the tensor is empty. So their buckets have the
    same parameters, and a collective operation in one's step meets the same one in the others'.
    """
    if spread_of(param) is None:
        return fields[-1].parts[-1].end if fields else 0
    room = 0
    for _, value in leaves(state):
        if isinstance(value, torch.Tensor) and device.owns(value):
            like = param if spread_of(value) is None and value.shape == local_shape(param) else value
            room += _padded(largest_share(like) * value.element_size())
    return room


class Pieces(NamedTuple):
    """The plain tensors that a tensor consists of, and what makes such a tensor of others. See `Field`."""

    tensors: Sequence[torch.Tensor]
    rebuild: Rebuild | None
    kind: object


class Splitter:
    """Splits a value of a state into the plain tensors that it consists of. None for what stays where it is.

    Stays: what is no tensor, step counters on the CPU and whatever else is not on the device, empty tensors, sparse
    ones, and those with gaps or in a format of the device's own.

    changes: whether the answer depends on what `look` has found.
    """

    changes = False

    def __init__(self, device: Device) -> None:
        self.device = device

    def look(self) -> None:
        """Looks at the tensors of the optimizer as they are now. See `OwnTensors`."""

    def __call__(self, value: object) -> Pieces | None:
        if not isinstance(value, torch.Tensor):
            return None
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return Pieces([value.detach()], None, None) if _moves(value, self.device) else None
        apart = take_apart(value)
        if apart is None:
            return None
        parts = [part for part in apart.parts if part is not None]
        if len(parts) < len(apart.parts) or not parts or not all(_moves(part, self.device) for part in parts):
            return None
        return Pieces(parts, apart.rebuild, (type(value), value.shape, spread_of(value)))


class OwnTensors(Splitter):
    """Moves only tensors whose memory nothing else refers to that the optimizer has.

    An optimizer may have a state that is a view of a larger tensor which it keeps elsewhere, or that is the
    parameter itself. It would go on with the other one, and not with what was moved and brought back.
    """

    changes = True

    def __init__(self, device: Device, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(device)
        self._optimizer = optimizer
        self._shared: Set[int] = frozenset()

    def look(self) -> None:
        """Finds out what is shared now."""
        grads = [param.grad for param in params_of(self._optimizer)]
        users = Counter(
            storage
            for value in contents([vars(self._optimizer), grads])
            if isinstance(value, torch.Tensor)
            for storage in _storages(value)
        )
        self._shared = {storage for storage, count in users.items() if count > 1}

    def __call__(self, value: object) -> Pieces | None:
        pieces = super().__call__(value)
        return pieces if pieces is not None and all(map(self._alone, pieces.tensors)) else None

    def _alone(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().nbytes() == tensor.nbytes and _storage(tensor) not in self._shared


def pieces_of(param: Param, value: object, split: Splitter) -> Pieces | None:
    """What `split` makes of a value of a parameter's state. None, too, where that lies in the parameter."""
    pieces = split(value)
    return None if pieces is None or any(lies_in(each, param) for each in pieces.tensors) else pieces


def lies_in(tensor: torch.Tensor, param: Param) -> bool:
    """Whether a tensor of a state is its parameter, or shares its memory, as `param.float()` may.

    The optimizer would go on with the parameter, and not with what was moved and brought back.
    """
    with AsPlainTensors():  # a parameter that waits for something is not asked for by this
        return not set(_storages(tensor)).isdisjoint(_storages(param))


def params_of(optimizer: torch.optim.Optimizer) -> list[Param]:
    """All parameters, in the order of their groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _moves(tensor: torch.Tensor, device: Device) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.nbytes > 0
        and device.owns(tensor)
        and not tensor.is_conj()
        and not tensor.is_neg()
        and without_gaps(tensor)
        and device.plain_layout(tensor)
    )


def without_gaps(tensor: torch.Tensor) -> bool:
    """Whether its elements fill the memory from the first to the last, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _storages(value: torch.Tensor) -> list[int]:
    """Of each plain tensor that it consists of, and that has any bytes, the storage."""
    parts = plain_tensors(value)
    return [_storage(part) for part in parts if part.layout is torch.strided and part.nbytes]


def _storage(tensor: torch.Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def leaves(state: Any) -> Iterator[tuple[Path, Any]]:
    """Each value that is no dictionary or list, and where it is. A tuple is one value: it cannot be filled."""
    for key, value in list(state.items() if isinstance(state, dict) else enumerate(state)):
        if isinstance(value, dict) or type(value) is list:
            yield from (((key, *path), leaf) for path, leaf in leaves(value))
        else:
            yield (key,), value


def leaf_at(state: Any, path: Path) -> Any:
    """The value at the end of a path; None if the path leads nowhere."""
    for key in path:
        try:
            state = state[key] if not isinstance(state, dict) else dict.__getitem__(state, key)
        except (KeyError, IndexError, TypeError):
            return None
    return state


def put_leaf(state: Any, path: Path, value: Any) -> None:
    """Puts another value at the end of a path that leads somewhere."""
    *way, last = path
    for key in way:
        state = state[key]
    state[last] = value


def contents(value: Any) -> Iterator[Any]:
    """The values in all that Python's own containers have, however deep; keys are none."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple | set | frozenset | deque):
        yield value
        return
    for each in value:
        yield from contents(each)


def on_cpu(value: Any, done: Collection[int] = ()) -> Any:
    """A copy of a value, in which all tensors are copies on the CPU. DTensors are DTensors.

    What is one tensor in several places is so in the copy. done: the ids of tensors that are such copies already.
    """
    copies: dict[int, torch.Tensor] = {}

    def copy_of(each: torch.Tensor) -> torch.Tensor:
        if id(each) in done:
            return each
        if id(each) not in copies:
            copies[id(each)] = copied(each, "cpu")
        return copies[id(each)]

    return with_tensors(value, copy_of)


def with_tensors(value: Any, replaced: Callable[[Any], Any], kinds: tuple[type, ...] = (torch.Tensor,)) -> Any:
    """A value with other tensors. Its dictionaries, lists and tuples are copies.

    kinds: the types of what is replaced.
    """
    if isinstance(value, kinds):
        return replaced(value)
    if isinstance(value, dict):
        new = copy(value)
        new.update((key, with_tensors(each, replaced, kinds)) for key, each in value.items())
        return new
    if type(value) in (list, tuple):
        return type(value)(with_tensors(each, replaced, kinds) for each in value)
    return value


class Spread(NamedTuple):
    """How a DTensor lies over processes: which these are, and what part of it each of them has."""

    mesh: Any
    placements: tuple[Any, ...]


def spread_of(tensor: torch.Tensor) -> Spread | None:
    """None for a tensor that is no DTensor."""
    dtensor = as_dtensor(tensor)
    return None if dtensor is None else Spread(dtensor.device_mesh, tuple(dtensor.placements))


def largest_share(tensor: torch.Tensor) -> int:
    """The elements that one process has, where that are most: in all processes the same number."""
    spread = spread_of(tensor)
    if spread is None:
        return tensor.numel()
    shape = list(tensor.shape)
    for size, placement in zip(spread.mesh.shape, spread.placements, strict=True):
        if (dim := getattr(placement, "dim", None)) is not None:
            shape[dim] = -(-shape[dim] // size)
    return math.prod(shape)


def local_shape(tensor: torch.Tensor) -> torch.Size:
    """The shape of what this process has."""
    dtensor = as_dtensor(tensor)
    return tensor.shape if dtensor is None else dtensor.to_local().shape


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of it. For a DTensor all of its processes have to call this."""
    dtensor = as_dtensor(tensor)
    return tensor if dtensor is None else dtensor.full_tensor()
