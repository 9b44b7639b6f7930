"""Parameters whose states move together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import torch

from ..device import Device, Stream
from ..tiers import DeviceSlot, HostSlot
from .layout import Field, Layout, as_bytes, fields_of, movable_parts
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
        self._views: dict[tuple[Param, object], torch.Tensor] = {}

    def away(self, params: Iterable[Param] | None = None) -> bool:
        """Whether anything of these parameters' states is away; of any, by default."""
        return any(
            isinstance(value, Away)
            for param in (self.params if params is None else params)
            for value in self.states.get(param, {}).values()
        )

    def here(self) -> bool:
        """Whether anything that could move is on the device."""
        return any(
            isinstance(self.states.get(param, {}).get(field.key), torch.Tensor)
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
            if isinstance(self.states[param].get(field.key), Away)
        )

    def arrive(self, params: Iterable[Param], flat: torch.Tensor) -> None:
        """The bytes of what was away of these parameters are in `flat`: their states are views of it."""
        self._flat = flat
        for param in params:
            state = self.states.get(param, {})
            for field in self.fields.get(param, ()):
                if isinstance(state.get(field.key), Away):
                    state[field.key] = self._views[param, field.key] = field.of(flat)

    def fits(self, device: Device) -> bool:
        """Whether the states that are on the device are as `fields` says. An optimizer may change their shapes."""
        views = set(map(id, self._views.values()))
        return all(
            _fits([(key, value) for key, value in state.items() if id(value) not in views], fields, device)
            for param, state in self.states.items()
            for fields in [self.fields.get(param, ())]
        )

    def lay_out(self, device: Device) -> None:
        """Finds a new place in the bucket for all tensors, which are on the device, in memory of their own then."""
        for (param, key), view in self._views.items():
            if self.states.get(param, {}).get(key) is view:
                self.states[param][key] = view.clone()
        self.forget_flat()
        end = 0
        self.fields = {}
        for param in self.params:
            fields = fields_of(self.states.get(param, {}), device, end)
            if fields:
                self.fields[param] = fields
                end = fields[-1].parts[-1].end
        self.nbytes = end

    def copies(self, param: Param, cpu: torch.Tensor | None) -> State:
        """A copy of a parameter's state on the CPU.

        cpu: the bucket's bytes, if anything is away.
        """
        fields = {field.key: field for field in self.fields.get(param, ())}
        return {
            key: fields[key].of(cpu).clone() if isinstance(value, Away) and cpu is not None else on_cpu(value)
            for key, value in self.states[param].items()
        }

    def leave(self, host: HostSlot, stream: Stream, changed: Set[Param], device: Device) -> Leaving:
        """What has to be copied to the host, so that no tensor of these states is needed on the device.

        Afterwards all are away. What came to `flat` and is not of a parameter in `changed` is not copied back.
        stream: on which they were changed.
        """
        moves: list[tuple[DeviceSlot, HostSlot]] = []
        in_place: list[tuple[int, int]] = []
        strangers: list[torch.Tensor] = []
        for param in self.params:
            state = self.states.get(param, {})
            for field in self.fields.get(param, ()):
                value = state.get(field.key)
                if not isinstance(value, torch.Tensor):
                    continue
                if value is self._views.get((param, field.key)):
                    if param in changed:
                        in_place.append((field.parts[0].offset, field.parts[-1].end))
                    continue
                pieces = movable_parts(value, device)
                for part, tensor in zip(field.parts, pieces.tensors if pieces else (), strict=True):
                    to = HostSlot(host.tensor[part.offset : part.offset + part.nbytes], host.lease)
                    moves.append((DeviceSlot(as_bytes(tensor), stream), to))
                strangers.append(value)
                state[field.key] = Away()
        for start, end in _joined(in_place):
            to = HostSlot(host.tensor[start:end], host.lease)
            moves.append((DeviceSlot(self._window()[start:end], stream), to))
        self.forget_flat()
        return Leaving(moves, strangers)

    def forget_flat(self) -> None:
        """The device's copy of the bytes is given up. What is a view of it is away again."""
        for (param, key), view in self._views.items():
            if self.states.get(param, {}).get(key) is view:
                self.states[param][key] = Away()
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


def pack(params: Iterable[tuple[Param, Layout]], limit: int) -> list[Bucket]:
    """Buckets for parameters and states of these layouts, of at most `limit` bytes unless one alone is larger.

    Each goes to the first bucket that has room, as the small ones between large ones would make many small buckets.
    Parameters whose state has nothing that moves are in a bucket of 0 bytes, if any.
    """
    contents: list[_Content] = []
    open_ones: list[_Content] = []
    still: list[Param] = []
    for param, layout in params:
        if not layout.room:
            still.append(param)
            continue
        content = next((each for each in open_ones if each.used + layout.room <= limit), None)
        if content is None:
            content = _Content()
            contents.append(content)
            open_ones.append(content)
        content.add(param, layout)
        if content.used >= limit:
            open_ones.remove(content)
    buckets = [Bucket(content.params, content.fields) for content in contents]
    if still:
        buckets.append(Bucket(still, {}))
    return buckets


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


def _fits(values: Iterable[tuple[object, object]], fields: Sequence[Field], device: Device) -> bool:
    known = {field.key: field for field in fields}
    for key, value in values:
        if isinstance(value, Away):
            continue
        pieces = movable_parts(value, device)
        if pieces is None:
            if key in known and isinstance(value, torch.Tensor):
                return False
            continue
        if key not in known or pieces.kind != known[key].kind or len(pieces.tensors) != len(known[key].parts):
            return False
        for tensor, part in zip(pieces.tensors, known[key].parts, strict=True):
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
