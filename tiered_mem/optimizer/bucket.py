"""Parameters whose states move together, and where their bytes rest between steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ..allocators.base import round_up
from ..device.transfer import Ticket
from ..errors import Closed, TierFull
from ..ground.wrappers import copied
from ..sizes import format_bytes
from ..spill.lower_tier import LowerTier
from ..tiers.host_tier import HostSlot, HostTier
from ..tiers.shelf import Exclusive, FixedSlots, ParcelState, Shelf
from .layout import (
    Field,
    Param,
    Path,
    Splitter,
    State,
    StateLayout,
    fields_of,
    leaf_at,
    leaves,
    on_cpu,
    pieces_of,
    put_leaf,
    with_tensors,
)

# How many buckets a step is ahead with reads from disk.
AHEAD = 3
# Some are read, one is stepped, the next is on the device already, and some are written.
_SLOTS = 8
_SLOTS_FOR_LARGE = 3


class Bucket:
    """Parameters and their states, whose tensors move together.

    params: in the order of their groups. fields: where the tensors of each parameter's state lie in the bucket's
    bytes. nbytes: what these take, on the host and on the device. room: what they take in the process that has most
    of them. states: of the parameters that have one; a tensor that is away has an `Absent` in its place.
    residence: where the bytes are then. flat: the bytes on the device, while they are there. stays: they are to be
    there between steps too.
    """

    def __init__(self) -> None:
        self.params: list[Param] = []
        self.fields: dict[Param, tuple[Field, ...]] = {}
        self.nbytes = self.room = 0
        self.states: dict[Param, State] = {}
        self.residence: Residence | None = None
        self.flat: torch.Tensor | None = None
        self.stays = False
        self._views: dict[tuple[Param, Path], torch.Tensor] = {}

    def add(self, param: Param, layout: StateLayout) -> None:
        """One more parameter, whose state lies behind those that are here."""
        self.params.append(param)
        self.room += layout.room
        self._append(param, tuple(field.after(self.nbytes) for field in layout.fields))

    def away(self, params: Iterable[Param] | None = None) -> bool:
        """Whether anything of these parameters' states is away; of any, by default."""
        return any(
            isinstance(value, Absent)
            for param in (self.params if params is None else params)
            for _, value in leaves(self.states.get(param, {}))
        )

    def here(self) -> bool:
        """Whether anything that could move is on the device."""
        return any(isinstance(value, torch.Tensor) for _, _, value in self._values(self.params))

    def runs(self, params: Set[Param]) -> list[tuple[int, int]]:
        """The ranges of bytes that hold what is away of these parameters' states, neighbours joined."""
        return _joined(field.span for _, field, value in self._values(params) if isinstance(value, Absent))

    def arrive(self, params: Iterable[Param], flat: torch.Tensor) -> None:
        """The bytes of what was away of these parameters are in `flat`: their states are views of it."""
        self.flat = flat
        for param, field, value in self._values(params):
            if isinstance(value, Absent):
                view = self._views[param, field.path] = field.of(flat)
                put_leaf(self.states[param], field.path, view)

    def fits(self, split: Splitter, *, every: bool = False) -> bool:
        """Whether the states that are on the device are as `fields` says. An optimizer may change their shapes.

        every: look at those, too, that are still what came.
        """
        return all(
            self._is_as_before(param, path, value, split)
            for param, state in self.states.items()
            for path, value in leaves(state)
            if every or value is not self._views.get((param, path))
        )

    def lay_out(self, split: Splitter) -> None:
        """Finds a new place in the bucket for all tensors, which are on the device, in memory of their own then."""
        ours = set(map(id, self._views.values()))
        for state in self.states.values():
            for path, value in leaves(state):
                if id(value) in ours:
                    put_leaf(state, path, copied(value))
        self.drop_flat()
        self.nbytes, self.fields = 0, {}
        for param in self.params:
            self._append(param, fields_of(param, self.states.get(param, {}), split, self.nbytes))

    def copies(self) -> dict[Param, State]:
        """Copies of the states on the CPU. Waits. Raises what `Residence.take` does."""
        cpu = self.residence.copy_out() if self.residence is not None and self.away() else None
        copies = {param: on_cpu(self.states[param]) for param in self.params if param in self.states}
        for param, field, value in self._values(self.params):
            if cpu is not None and isinstance(value, Absent):
                put_leaf(copies[param], field.path, copied(field.of(cpu)))
        return copies

    def copy_of(self, param: Param, device: torch.device) -> State:
        """A copy of one parameter's state. What is away comes to the device. Waits. Raises what `copies` does."""
        state: State = with_tensors(self.states[param], copied)
        away = [field for _, field, value in self._values([param]) if isinstance(value, Absent)]
        if away and self.residence is not None:
            start, end = away[0].span[0], away[-1].span[1]
            cpu = self.residence.copy_out(start, end)
            for field in away:
                put_leaf(state, field.path, copied(field.after(-start).of(cpu), device))
        return state

    def leave(
        self, host: HostSlot, changed: Set[Param], split: Splitter
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """What has to be copied to the host, so that no tensor of these states is needed on the device.

        Afterwards all are away. What came to `flat` and is not of a parameter in `changed` is not copied back.

        Returns what is to be copied and where to, and the tensors beside `flat` that are read, which have to live
        until that has ended.
        """
        of: list[torch.Tensor] = []
        to: list[torch.Tensor] = []
        in_place: list[tuple[int, int]] = []
        strangers: list[torch.Tensor] = []
        for param, field, value in self._values(self.params):
            if not isinstance(value, torch.Tensor):
                continue
            if value is self._views.get((param, field.path)):
                if param in changed:
                    in_place.append(field.span)
                continue
            pieces = split(value)
            for part, tensor in zip(field.parts, pieces.tensors if pieces else (), strict=True):
                of.append(_as_bytes(tensor))
                to.append(host.tensor[part.offset : part.offset + part.nbytes])
            strangers.append(value)
            put_leaf(self.states[param], field.path, Absent())
        if self.flat is not None:
            for start, end in _joined(in_place):
                of.append(self.flat[start:end])
                to.append(host.tensor[start:end])
        self.drop_flat()
        return of, to, strangers

    def drop_flat(self) -> None:
        """The device's copy of the bytes is needed no more. States that are views of it count as away."""
        for (param, path), view in self._views.items():
            if leaf_at(self.states.get(param), path) is view:
                put_leaf(self.states[param], path, Absent())
        self._views.clear()
        self.flat = None

    def close(self) -> None:
        """Frees the bytes where they rest. The states are gone."""
        if self.residence is not None:
            self.residence.drop()
        self.states.clear()

    def _values(self, params: Iterable[Param]) -> Iterator[tuple[Param, Field, Any]]:
        """What is where the fields of these parameters are, None where there is nothing."""
        for param in params:
            for field in self.fields.get(param, ()):
                yield param, field, leaf_at(self.states.get(param), field.path)

    def _append(self, param: Param, fields: tuple[Field, ...]) -> None:
        if fields:
            self.fields[param] = fields
            self.nbytes = fields[-1].parts[-1].end

    def _is_as_before(self, param: Param, path: Path, value: object, split: Splitter) -> bool:
        field = next((field for field in self.fields.get(param, ()) if field.path == path), None)
        pieces = None if isinstance(value, Absent) else pieces_of(param, value, split)
        if pieces is None:
            return field is None or not isinstance(value, torch.Tensor)
        return field is not None and field.describes(pieces)


class Absent:
    """Stands in a state for a tensor that is not on the device."""

    def __repr__(self) -> str:
        return "<not on the device>"


class Residence:
    """Where the bytes of one bucket rest between steps: a parcel of a shelf, of which it takes care.

    Not thread-safe: one step runs at a time. `take` and `leave` come in pairs, and nothing else but `ticket`
    between them. What is called out of turn raises RuntimeError, and `take` after `drop` raises Closed.

    shelf: with slots of at least `nbytes`. name: of the bucket, in its records and in errors.
    """

    def __init__(self, shelf: Shelf, nbytes: int, name: str) -> None:
        self._shelf = shelf
        self._parcel = shelf.parcel(name, nbytes)

    def fetch(self) -> None:
        """Begins to bring the bytes into host memory, where there is room for them.

        Does not wait, and never raises for a failed read: `take` does.
        """
        if self._parcel.slot is None and self._parcel.record is not None:
            self._shelf.poll()
            slot = self._shelf.slots.get()
            if slot is not None:
                with suppress(Closed):
                    self._shelf.read(self._parcel, slot)

    @property
    def ready(self) -> bool:
        """Whether the bytes are in host memory, and `take` would not wait."""
        job = self._parcel.job
        return self._parcel.slot is not None and (job is None or job.done)

    def take(self, *, blank: bool = False) -> HostSlot:
        """The host memory of the bytes, a uint8 slot of as many, until `leave`.

        blank: the bytes that there may be are not needed, all of the memory is to be filled.

        May wait. Raises CorruptRecord, OSError, TierFull or Closed before anything is changed, and may be called
        again after that.
        """
        parcel = self._parcel
        if parcel.state is ParcelState.DROPPED:
            raise Closed(f"{parcel.name} was released, or its optimizer closed")
        self._check_turn(taken=False)
        if not (blank or parcel.newer or parcel.record is not None):
            raise RuntimeError("there are no bytes yet: take(blank=True) is for the first ones")
        if parcel.slot is None:
            self._shelf.read(parcel, self._room(), blank=blank)
        return self._shelf.take(parcel, blank=blank)

    @property
    def ticket(self) -> Ticket | None:
        """The last copy that may still use the host memory: a reload has to come after it."""
        return self._parcel.last

    def leave(self, filled: Ticket | None, read: Ticket | None = None) -> None:
        """The copies in and out have been started.

        filled: the one that changed the host memory. None if nothing changed: then nothing is written back.
        read: the one that reads it, where no `filled` comes after that. The memory is left alone until it ended.
        """
        self._check_turn(taken=True)
        parcel = self._parcel
        parcel.last = filled or read or parcel.last
        parcel.newer = parcel.newer or filled is not None
        self._shelf.put(parcel)

    def drop(self) -> None:
        """The bytes are not needed any more. Idempotent.

        Waits for nothing on the device; the last one of a shelf does for the shelf's file operations.
        """
        self._check_turn(taken=False)
        if self._parcel.state is not ParcelState.DROPPED:
            self._shelf.drop(self._parcel)

    def copy_out(self, start: int = 0, end: int | None = None) -> torch.Tensor:
        """The bytes as of the last `leave`: a uint8 tensor in pageable memory. Waits. Raises what `take` does.

        start, end: of a part of them.
        """
        with self.on_host() as flat:
            return flat[start:end].clone()

    @contextmanager
    def on_host(self) -> Iterator[torch.Tensor]:
        """Inside, the bytes as of the last `leave`, to be read. Waits. Raises what `take` does."""
        slot = self.take()
        try:
            if self.ticket is not None:
                self.ticket.wait()
            yield slot.tensor
        finally:
            self.leave(None)

    def _room(self) -> HostSlot:
        """A free slot. Waits for one where that helps, or takes a further one of the host tier."""
        shelf = self._shelf
        shelf.poll()
        while (slot := shelf.slots.get()) is None:
            if not shelf.wait() and not shelf.drop_clean():
                reason = f" and the disk takes nothing ({shelf.refusal})" if shelf.kept else ""
                full = f"optimizer states fill {shelf.slots.count} such slots{reason}; raise host_bytes"
                return shelf.slots.more(full)
        return slot

    def _check_turn(self, *, taken: bool) -> None:
        if taken is not (self._parcel.state is ParcelState.TAKEN):
            raise RuntimeError("take comes before leave" if taken else "the bytes are in use: leave comes first")


class Residences:
    """Makes residences for buckets: on disk, by way of a few slots of host memory, or on the host, each in its own.

    A shelf has slots of one size. They are reserved when buckets are housed, and are there until the last of them
    is released: a step does not depend on what room the host tier has.

    disk: None for the host.
    bucket_bytes: half of the device memory that states pass through in a step, a parameter aside whose state is
    larger. Buckets on disk that are larger share slots of their own.
    host_share: of what is free in the host tier, what buckets take before others go to disk.
    """

    def __init__(
        self,
        host: HostTier,
        disk: LowerTier | None,
        exclusive: Exclusive,
        bucket_bytes: int,
        host_share: float = 0.0,
    ) -> None:
        self._host = host
        self._disk = disk
        self._exclusive = exclusive
        self.bucket_bytes = bucket_bytes
        self._host_share = host_share
        self._shelves: list[Shelf] = []
        self._numbers = itertools.count()
        self._step = 0

    def house(self, buckets: Sequence[Bucket]) -> None:
        """Gives each bucket that has anything to move a residence. Raises TierFull; then none has got one."""
        self._shelves = [shelf for shelf in self._shelves if shelf.slots.count]
        moving = [bucket for bucket in buckets if bucket.nbytes]
        sizes = [bucket.nbytes for bucket in moving]
        if self._disk is None:
            advice = "it is for optimizer states: raise host_bytes, or put them on disk"
            shelves = self._build([(size, 1) for size in sizes], advice)
        else:
            on_host = self._on_host(sizes)
            rest = sizes[on_host:]
            self._check_disk(self._disk, sum(rest))
            wanted = self._missing(rest)
            self._build(wanted, self._advice(wanted), self._disk)
            shelves = self._build([(size, 1) for size in sizes[:on_host]], "")
            shelves += [self._fitting(size)[0] for size in rest]
        for bucket, shelf in zip(moving, shelves, strict=True):
            bucket.residence = Residence(shelf, bucket.nbytes, f"states.{next(self._numbers)}")

    @property
    def host_bytes(self) -> int:
        """The host memory that is taken."""
        return sum(shelf.slots.count * shelf.slots.nbytes for shelf in self._shelves)

    def step_begins(self) -> None:
        """What is written from now on is of the next step."""
        self._step += 1
        for shelf in self._shelves:
            shelf.step = self._step

    def poll(self) -> None:
        """Goes on with files that can go on. Does not wait."""
        if self._disk is not None:
            for shelf in self._shelves:
                shelf.poll()

    def wait(self) -> None:
        """Waits until every file is written."""
        for shelf in self._shelves:
            shelf.poll()
            while shelf.wait():
                pass

    def close(self) -> None:
        """Gives all host memory back."""
        for shelf in self._shelves:
            shelf.close()

    def _on_host(self, sizes: Sequence[int]) -> int:
        """How many of the buckets, from the first on, the host tier has room for."""
        with self._exclusive:
            used, limit = self._host.usage()
        if not self._host_share or limit is None:
            return len(sizes) if self._host_share else 0
        taken = itertools.accumulate(round_up(size) for size in sizes)
        room = (limit - used) * self._host_share
        return sum(nbytes <= room for nbytes in taken)

    def _build(self, wanted: Sequence[tuple[int, int]], advice: str, disk: LowerTier | None = None) -> list[Shelf]:
        """Shelves with slots of so many bytes, and so many of them. Raises TierFull; then there is none."""
        slots: list[FixedSlots] = []
        try:
            for nbytes, count in wanted:
                slots.append(FixedSlots(self._host, self._exclusive, nbytes, count, advice))
        except BaseException:
            for each in slots:
                each.close()
            raise
        new = [Shelf(each, disk, "optimizer", self._step) for each in slots]
        self._shelves = sorted([*self._shelves, *new], key=lambda shelf: shelf.slots.nbytes)
        return new

    def _missing(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """The size of the slots, and their number, of the shelves that are to be there for these buckets."""
        large = [size for size in sizes if size > self.bucket_bytes]
        usual = [size for size in sizes if size <= self.bucket_bytes]
        return [
            (max(some), min(slots, len(some)))
            for some, slots in ((large, _SLOTS_FOR_LARGE), (usual, _SLOTS))
            if some and not self._fitting(max(some))
        ]

    def _fitting(self, nbytes: int) -> list[Shelf]:
        """Those before the disk with slots that are large enough, the smallest first."""
        return [shelf for shelf in self._shelves if shelf.slots.nbytes >= nbytes and shelf.to_disk]

    def _advice(self, wanted: Sequence[tuple[int, int]]) -> str:
        with self._exclusive:
            used = self._host.pool_stats().used
        enough = used + sum(slots * round_up(nbytes) for nbytes, slots in wanted)
        parts = " and ".join(f"{slots} of {format_bytes(nbytes)}" for nbytes, slots in wanted)
        return (
            f"optimizer states pass through slots of host memory on their ways to disk and back, {parts}: "
            f"host_bytes={enough} ({format_bytes(enough)}) is the least that will do, or lower bucket_bytes"
        )

    def _check_disk(self, disk: LowerTier, nbytes: int) -> None:
        stats = disk.stats()
        used, limit = stats.used, stats.capacity
        if nbytes > limit:
            advice = "it is for optimizer states: raise spill_bytes, or put them on the host"
            raise TierFull("disk", needed=nbytes, free=limit - used, used=used, limit=limit, advice=advice)


def pack(params: Iterable[tuple[Param, StateLayout]], limit: int, *, in_order: bool = False) -> list[Bucket]:
    """Buckets for parameters and states of these layouts, of at most `limit` bytes unless one alone is larger.

    Each goes to the first bucket that has room, as the small ones between large ones would make many small buckets.
    Parameters whose state has nothing that moves are in a bucket of 0 bytes, if any. in_order: all parameters stay
    in the order in which they are given, whatever room is lost.
    """
    buckets: list[Bucket] = []
    with_room: list[Bucket] = []
    still = Bucket()
    for param, layout in params:
        if not layout.room and not in_order:
            still.add(param, layout)
            continue
        for bucket in with_room:
            if not layout.room or not bucket.room or bucket.room + layout.room <= limit:
                break
        else:
            bucket = Bucket()
            buckets.append(bucket)
            with_room = [bucket] if in_order else [*with_room, bucket]
        bucket.add(param, layout)
        if bucket.room >= limit and not in_order:
            with_room.remove(bucket)
    return [*buckets, still] if still.params else buckets


def fetch_ahead(buckets: Sequence[Bucket], needed: Mapping[Bucket, Set[Param]] | None = None) -> None:
    """Begins to read the first of these buckets from disk. needed: the parameters of each; all, by default."""
    for bucket in buckets[:AHEAD]:
        if bucket.residence is not None and bucket.away(None if needed is None else needed[bucket]):
            bucket.residence.fetch()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a plain tensor without gaps, as a 1-dimensional uint8 view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges in order, neighbours as one."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and joined[-1][1] == start:
            start, _ = joined.pop()
        joined.append((start, end))
    return joined
