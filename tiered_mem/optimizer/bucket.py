"""Parameters whose states move together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import torch

from ..device import Stream
from ..host_tier import DeviceSlot, HostSlot
from .layout import Field, Layout, Movable, as_bytes, fields_of
from .leaves import Path, leaf_at, leaves, put_leaf
from .partial_step import Param, State
from .residence import Residence
from .snapshot import on_cpu


class Away:
    """Stands in a state for a tensor that is not on the device."""

    def __repr__(self) -> str:
        return "<not on the device>"


class Bucket:
    """Parameters and their states, whose tensors move together.

    params: in the order of their groups. fields: where the tensors of each parameter's state lie in the bucket's
    bytes. nbytes: what these take, on the host and on the device. states: of the parameters that have one; a tensor
    that is away has an `Away` in its place. residence: where the bytes are then.
    """

    def __init__(self, params: Sequence[Param], fields: dict[Param, tuple[Field, ...]]) -> None:
        self.params = list(params)
        self.fields = fields
        self.nbytes = max(
            (part.end for each in fields.values() for field in each for part in field.parts), default=0
        )
        self.states: dict[Param, State] = {}
        self.residence: Residence | None = None
        self._flat: torch.Tensor | None = None
        self._views: dict[tuple[Param, Path], torch.Tensor] = {}

    def away(self, params: Iterable[Param] | None = None) -> bool:
        """Whether anything of these parameters' states is away; of any, by default."""
        return any(
            isinstance(value, Away)
            for param in (self.params if params is None else params)
            for _, value in leaves(self.states.get(param, {}))
        )

    def here(self) -> bool:
        """Whether anything that could move is on the device."""
        return any(
            isinstance(leaf_at(self.states.get(param), field.path), torch.Tensor)
            for param, fields in self.fields.items()
            for field in fields
        )

    def runs(self, params: Set[Param]) -> list[tuple[int, int]]:
        """The ranges of bytes that hold what is away of these parameters' states, neighbours joined."""
        return _joined(
            (field.parts[0].offset, field.parts[-1].end)
            for param in self.params
            if param in params and param in self.states
            for field in self.fields.get(param, ())
            if isinstance(leaf_at(self.states[param], field.path), Away)
        )

    @property
    def flat(self) -> torch.Tensor | None:
        """The bytes on the device, while they are there."""
        return self._flat

    def arrive(self, params: Iterable[Param], flat: torch.Tensor) -> None:
        """The bytes of what was away of these parameters are in `flat`: their states are views of it."""
        self._flat = flat
        for param in params:
            state = self.states.get(param)
            for field in self.fields.get(param, ()):
                if isinstance(leaf_at(state, field.path), Away):
                    view = self._views[param, field.path] = field.of(flat)
                    put_leaf(state, field.path, view)

    def fits(self, movable: Movable, *, every: bool = False) -> bool:
        """Whether the states that are on the device are as `fields` says. An optimizer may change their shapes.

        every: look at those, too, that are still what came.
        """
        return all(
            _fits(
                (
                    (path, value)
                    for path, value in leaves(state)
                    if every or value is not self._views.get((param, path))
                ),
                self.fields.get(param, ()),
                movable,
            )
            for param, state in self.states.items()
        )

    def lay_out(self, movable: Movable) -> None:
        """Finds a new place in the bucket for all tensors, which are on the device, in memory of their own then."""
        ours = set(map(id, self._views.values()))
        for state in self.states.values():
            for path, value in leaves(state):
                if id(value) in ours:
                    put_leaf(state, path, value.clone())
        self.forget_flat()
        end = 0
        self.fields = {}
        for param in self.params:
            fields = fields_of(self.states.get(param, {}), movable, end)
            if fields:
                self.fields[param] = fields
                end = fields[-1].parts[-1].end
        self.nbytes = end

    def copies(self, param: Param, cpu: torch.Tensor | None) -> State:
        """A copy of a parameter's state on the CPU.

        cpu: the bucket's bytes, if anything is away.
        """
        copied: State = on_cpu(self.states[param])
        for field in self.fields.get(param, ()):
            if cpu is not None and isinstance(leaf_at(copied, field.path), Away):
                put_leaf(copied, field.path, field.of(cpu).clone())
        return copied

    def leave(self, host: HostSlot, stream: Stream, changed: Set[Param], movable: Movable) -> Leaving:
        """What has to be copied to the host, so that no tensor of these states is needed on the device.

        Afterwards all are away. What came to `flat` and is not of a parameter in `changed` is not copied back.
        stream: on which they were changed.
        """
        moves: list[tuple[DeviceSlot, HostSlot]] = []
        in_place: list[tuple[int, int]] = []
        strangers: list[torch.Tensor] = []
        for param in self.params:
            state = self.states.get(param)
            for field in self.fields.get(param, ()):
                value = leaf_at(state, field.path)
                if not isinstance(value, torch.Tensor):
                    continue
                if value is self._views.get((param, field.path)):
                    if param in changed:
                        in_place.append((field.parts[0].offset, field.parts[-1].end))
                    continue
                pieces = movable(value)
                for part, tensor in zip(field.parts, pieces.tensors if pieces else (), strict=True):
                    to = HostSlot(host.tensor[part.offset : part.offset + part.nbytes], host.lease)
                    moves.append((DeviceSlot(as_bytes(tensor), stream), to))
                strangers.append(value)
                put_leaf(state, field.path, Away())
        for start, end in _joined(in_place):
            to = HostSlot(host.tensor[start:end], host.lease)
            moves.append((DeviceSlot(self._window()[start:end], stream), to))
        self.forget_flat()
        return Leaving(moves, strangers)

    def forget_flat(self) -> None:
        """The device's copy of the bytes is given up. What is a view of it is away again."""
        for (param, path), view in self._views.items():
            if leaf_at(self.states.get(param), path) is view:
                put_leaf(self.states[param], path, Away())
        self._views.clear()
        self._flat = None

    def _window(self) -> torch.Tensor:
        if self._flat is None:
            raise RuntimeError("the bucket is not on the device")
        return self._flat


class Leaving(NamedTuple):
    """moves: copies to the host. strangers: what some of them read beside the bucket's copy on the device.

    Whatever is read must live until the copies have ended.
    """

    moves: list[tuple[DeviceSlot, HostSlot]]
    strangers: list[torch.Tensor]


def pack(params: Iterable[tuple[Param, Layout]], limit: int, *, in_order: bool = False) -> list[Bucket]:
    """Buckets for parameters and states of these layouts, of at most `limit` bytes unless one alone is larger.

    Each goes to the first bucket that has room, as the small ones between large ones would make many small buckets.
    Parameters whose state has nothing that moves are in a bucket of 0 bytes, if any. in_order: all parameters stay
    in the order in which they are given, whatever room is lost.
    """
    contents = _in_order(params, limit) if in_order else _first_fit(params, limit)
    return [Bucket(content.params, content.fields) for content in contents]


def _in_order(params: Iterable[tuple[Param, Layout]], limit: int) -> list[_Content]:
    contents: list[_Content] = []
    for param, layout in params:
        if not contents or (layout.room and contents[-1].used and contents[-1].used + layout.room > limit):
            contents.append(_Content())
        contents[-1].add(param, layout)
    return contents


def _first_fit(params: Iterable[tuple[Param, Layout]], limit: int) -> list[_Content]:
    contents: list[_Content] = []
    open_ones: list[_Content] = []
    still = _Content()
    for param, layout in params:
        if not layout.room:
            still.add(param, layout)
            continue
        content = next((each for each in open_ones if each.used + layout.room <= limit), None)
        if content is None:
            content = _Content()
            contents.append(content)
            open_ones.append(content)
        content.add(param, layout)
        if content.used >= limit:
            open_ones.remove(content)
    return [*contents, still] if still.params else contents


class _Content:
    """What is to be in one bucket."""

    def __init__(self) -> None:
        self.params: list[Param] = []
        self.fields: dict[Param, tuple[Field, ...]] = {}
        self.used = 0
        self._end = 0

    def add(self, param: Param, layout: Layout) -> None:
        self.params.append(param)
        self.used += layout.room
        if layout.fields:
            self.fields[param] = tuple(field.after(self._end) for field in layout.fields)
            self._end = self.fields[param][-1].parts[-1].end


def _fits(values: Iterable[tuple[Path, object]], fields: Sequence[Field], movable: Movable) -> bool:
    known = {field.path: field for field in fields}
    for path, value in values:
        if isinstance(value, Away):
            continue
        pieces = movable(value)
        if pieces is None:
            if path in known and isinstance(value, torch.Tensor):
                return False
            continue
        if path not in known or pieces.kind != known[path].kind or len(pieces.tensors) != len(known[path].parts):
            return False
        for tensor, part in zip(pieces.tensors, known[path].parts, strict=True):
            if (tensor.dtype, tensor.shape, tensor.stride()) != (part.dtype, part.shape, part.stride):
                return False
    return True


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges in order, neighbours as one."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined
