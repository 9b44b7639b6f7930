"""The device: its streams and events, and the most memory that was allocated on it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch

from ..errors import DeviceFailed, DeviceUnavailable, OffloadRefused
from .torch_private import current_stream, npu_format

_log = logging.getLogger("tiered_mem.device")
_KNOWN = ("npu", "cuda", "cpu")


class Event(Protocol):
    """A mark in a stream's work."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Stream(Protocol):
    """Work that a device does in order."""

    @property
    def stream_id(self) -> int: ...
    def record_event(self) -> Event: ...
    def wait_event(self, event: Event) -> None: ...
    def synchronize(self) -> None: ...


class Pool(NamedTuple):
    """The bytes that tensors have of torch's pool, and all that it has of the device.

    retries: how often it had to give pieces back before there was enough.
    """

    allocated: int
    reserved: int
    retries: int


class Device:
    """One device and its streams.

    Streams and events are torch's generic ones. They do what torch.npu's and torch.cuda's do, through the same task
    queue, at a fraction of the host time.

    device: such as "npu", "npu:1", "cuda:0" or "cpu"; None is torch's current accelerator, and the cpu with a
        warning where there is none. Raises ValueError for a kind that is not known and DeviceUnavailable for one
        that this machine does not have.
    """

    def __init__(self, device: str | torch.device | None) -> None:
        if device is None:
            device = torch.accelerator.current_accelerator(check_available=True)
            if device is None:
                _log.warning("torch finds no accelerator on this machine: device='cpu', where moving saves nothing")
                device = "cpu"
        kind, colon, index = str(device).partition(":")
        if kind not in _KNOWN or (colon and not index.isdecimal()):
            raise ValueError(
                f"unknown device {str(device)!r}; known are {', '.join(_KNOWN)}, as in 'npu' or 'npu:1'"
            )
        self.kind = kind
        self._module = _module(kind)
        self._number = self._existing(index) if self._module else 0
        self._npu_format = npu_format() if kind == "npu" else None  # each block that leaves is asked
        self.torch_device = torch.device(kind, self._number) if self._module else torch.device(kind)
        self._elapsed = _elapsed_on_npu() if kind == "npu" else torch.Event.elapsed_time
        self._probe: Stream | None = None
        # The stream on which the caller's thread issues its work now. Each tensor that is saved asks for it, and
        # torch.accelerator.current_stream() would call two more Python functions.
        here = partial(current_stream, self._number) if self._module else _InlineStream.only
        self.current_stream = cast(Callable[[], Stream], here)

    def empty(self, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """New device bytes as a 1-dimensional tensor. They go back to the pool of the current stream.

        Raises torch.OutOfMemoryError.
        """
        return torch.empty(nbytes // dtype.itemsize, dtype=dtype, device=self.torch_device)

    def new_stream(self) -> Stream:
        return cast(Stream, torch.Stream(self.torch_device)) if self._module else _INLINE

    def generic(self, stream: torch.Stream) -> Stream:
        """A caller's stream as one of torch's generic streams.

        torch.npu.Stream makes events that a generic stream does not wait for, and says nothing.
        """
        if self._module is None:
            return _INLINE
        same = torch.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
        return cast(Stream, same)

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """Work issued inside goes to `stream`. Raises OffloadRefused while the current one is captured."""
        if self._module is not None and self._module.is_current_stream_capturing():
            self.refuse_capture()
        return stream if isinstance(stream, torch.Stream) else contextlib.nullcontext()

    def refuse_capture(self) -> None:
        """Raises OffloadRefused while the current stream is captured for a graph.

        A replay would copy into host memory that belongs to another block by then, and what is to leave now stays.
        """
        if self._module is not None and self._module.is_current_stream_capturing():
            raise OffloadRefused("tiered_mem moves nothing while a graph is captured: capture outside its contexts")

    def wait_for(self, event: Event) -> None:
        """Waits on the host for an event. Raises DeviceFailed where it will never pass.

        After a failure torch_npu's queue drops what comes next, and whoever waits for an event in it does so for
        ever. An event that is recorded now tells: if it passes, all before it in the queue has reached the device.
        """
        if self.kind == "npu":
            self._probe = self._probe or self.new_stream()
            now = self._probe.record_event()
            self._probe.synchronize()
            if not now.query():
                raise DeviceFailed(
                    "a copy was dropped, because work before it failed on the device. The error of that work says "
                    "why; the process has to be started again"
                )
        event.synchronize()

    def synchronize(self) -> None:
        """Waits on the host for all that was queued, on every stream."""
        if self._module is not None:
            self._module.synchronize(self._number)

    def timed_event(self, stream: Stream) -> Event:
        """An event that is recorded on `stream` now. `elapsed` measures the time between two of them."""
        if self._module is None:
            return _InlineEvent()
        event = torch.Event(self.torch_device, enable_timing=True)
        event.record(cast(torch.Stream, stream))
        return cast(Event, event)

    def elapsed(self, start: Event, end: Event) -> float:
        """Seconds from one timed event to another. Both must have passed."""
        if isinstance(start, _InlineEvent) and isinstance(end, _InlineEvent):
            return end.at - start.at
        return self._elapsed(cast(torch.Event, start), cast(torch.Event, end)) / 1e3

    def below_peak(self) -> int:
        """The bytes of device memory that can be allocated without a new peak. 0 on the cpu."""
        allocated, peak, _ = self.memory()
        return peak - allocated

    def reset_peak(self) -> None:
        """The peak that torch tells of device memory begins anew."""
        if self._module is not None:
            self._module.reset_peak_memory_stats(self._number)

    def free_pieces(self) -> tuple[list[int], list[int]]:
        """The sizes of what torch's pool has free for the current stream: for large tensors, and for small ones."""
        large: list[int] = []
        small: list[int] = []
        if self._module is not None:
            stream = getattr(self._module.current_stream(self._number), f"{self.kind}_stream")
            for segment in self._module.memory_snapshot():
                ours = segment["device"] == self._number and segment["stream"] == stream
                if ours and tuple(segment["segment_pool_id"]) == (0, 0):
                    pieces = large if segment["segment_type"] == "large" else small
                    pieces += [piece["size"] for piece in segment["blocks"] if piece["state"] == "inactive"]
        return large, small

    def usable_and_total(self) -> tuple[int, int]:
        """The bytes of the device that this process has or could have, and all that there are. 0 on the cpu."""
        if self._module is None:
            return 0, 0
        free, total = self._module.mem_get_info(self._number)
        return int(free) + int(self._module.memory_reserved(self._number)), int(total)

    def memory(self) -> tuple[int, int, int]:
        """The bytes of device memory that tensors have, and the most since the last reset; and what they have now
        with what lies between them, so that torch's pool cannot give it back. 0 on the cpu.
        """
        if self._module is None:
            return 0, 0, 0
        # max_memory_allocated() takes half a millisecond and leaves work for the garbage collector.
        stats = self._module.memory_stats_as_nested_dict(self._number)
        allocated, between = stats["allocated_bytes"]["all"], stats["inactive_split_bytes"]["all"]
        now = int(allocated["current"])
        return now, int(allocated["peak"]), now + int(between["current"])

    def pool(self) -> Pool:
        """All zeros on the cpu."""
        if self._module is None:
            return Pool(0, 0, 0)
        stats = self._module.memory_stats_as_nested_dict(self._number)
        allocated, reserved = (int(stats[f"{of}_bytes"]["all"]["current"]) for of in ("allocated", "reserved"))
        return Pool(allocated, reserved, int(stats["num_alloc_retries"]))

    def empty_cache(self) -> None:
        """torch's pool gives back what it has cached, but not while a graph is captured."""
        if self._module is not None and not self._module.is_current_stream_capturing():
            self._module.empty_cache()

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.torch_device

    def check_some_here(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Raises ValueError for tensors of which none is here, or may yet come here from the CPU.

        name: what they are, as "the parameters of Llama".
        """
        places = {tensor.device for tensor in tensors}
        if places and places.isdisjoint((self.torch_device, torch.device("cpu"), torch.device("meta"))):
            theirs = min(map(str, places))
            raise ValueError(
                f"{name} are on {theirs}, and the manager moves what is on {self.torch_device}: make it with "
                f"TieringManager(device={theirs!r}), or move them by model.to({str(self.torch_device)!r})"
            )

    def plain_layout(self, tensor: torch.Tensor) -> bool:
        """Whether the storage holds the elements alone, in no private format of the device."""
        return self._npu_format is None or self._npu_format(tensor) in _NPU_PLAIN_FORMATS

    def _existing(self, index: str) -> int:
        count = self._module.device_count()
        chosen = int(index) if index else self._module.current_device()
        if chosen >= count:
            raise DeviceUnavailable(f"device '{self.kind}:{chosen}' asked for, but this machine has {count}")
        return int(chosen)


# ND, NCHW, NHWC and NCDHW in torch_npu's numbering; the others are tiled.
_NPU_PLAIN_FORMATS = frozenset({2, 0, 1, 30})


def _module(kind: str) -> Any:
    """torch.npu, torch.cuda, or None for the cpu."""
    if kind == "cpu":
        return None
    if kind == "npu":
        try:
            importlib.import_module("torch_npu")
        except ImportError as error:
            if error.name == "torch_npu":
                raise DeviceUnavailable("device 'npu' needs torch_npu: pip install 'tiered_mem[npu]'") from error
            raise DeviceUnavailable(f"device 'npu' asked for, but torch_npu does not load: {error}") from error
    module = getattr(torch, kind)
    if not module.is_available():
        raise DeviceUnavailable(f"device {kind!r} asked for, but torch.{kind}.is_available() is False")
    return module


def _elapsed_on_npu() -> Callable[[torch.Event, torch.Event], float]:
    """Measures the milliseconds between two events that have passed, and asks Ascend's runtime itself.

    torch_npu first drains its queue of work, and then waits for both events, passed or not: waits of the host for
    each time that is read.
    """
    measure = ctypes.CDLL("libascendcl.so").aclrtEventElapsedTime
    measure.argtypes = (ctypes.POINTER(ctypes.c_float), ctypes.c_void_p, ctypes.c_void_p)

    def elapsed(start: torch.Event, end: torch.Event) -> float:
        milliseconds = ctypes.c_float()
        code = measure(ctypes.byref(milliseconds), start.event_id, end.event_id)
        if code != 0:
            raise RuntimeError(f"aclrtEventElapsedTime failed with ACL code {code}: both events must have passed")
        return milliseconds.value

    return elapsed


class _InlineStream:
    """The cpu's only stream, and its own event: work is done when the call that issues it returns."""

    stream_id = 0

    @staticmethod
    def only() -> Stream:
        return _INLINE

    def record_event(self) -> Event:
        return self

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _InlineEvent:
    """A timed event of the cpu, which has passed as soon as it is made."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


_INLINE = _InlineStream()


# torch_npu asks for so many bytes more than a tensor has, and both pools give whole pieces of 512.
_PADDING = 32
_GRAIN = 512
# What torch's pool for small tensors gives at most. The other one splits a piece if more than this is left of it.
_SMALL = 1 << 20


class DevicePeak:
    """Reads the most that was allocated since it was last read.

    torch has one peak, which only rises until somebody begins it anew. So a peak below an earlier one is not seen,
    but from `begin_anew` on, where it is torch's own that begins anew with each reading. `restore` gives it back
    the height that it would have.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._told = 0  # torch's peak as it was last read
        self._before = 0  # the most since then, where `restore` has hidden it
        self._true: int | None = None  # torch's peak, if it had not begun anew here; None while it has not
        self._begun_anew_from = 0  # the most from the reading before `begin_anew` to that, if it is known

    @property
    def exact(self) -> bool:
        """Whether all that came and went since the last reading is seen."""
        return self._true is not None

    def read(self) -> tuple[int, int, int, int]:
        """The bytes that are allocated, the most since the last reading, and `Device.memory()`'s third.

        With `begin_anew` since the last reading the second is the most since that. What it was before is the
        fourth, and 0 where it is not known.
        """
        allocated, peak, reserved = self._device.memory()
        # One that is lower than it was began anew meanwhile, by the user.
        seen = peak if self.exact or peak != self._told else allocated
        most = max(seen, self._before)
        begun_anew_from = self._begun_anew_from
        self._told, self._before, self._begun_anew_from = peak, 0, 0
        if self._true is not None:
            self._true = max(self._true, peak)
        return allocated, most, reserved, begun_anew_from

    def look(self) -> int:
        """The most since the last reading, as far as it is seen by now.

        The next reading has it, also if the user begins the peak anew before.
        """
        allocated, peak, _ = self._device.memory()
        if self.exact or peak != self._told:
            self._before, self._told = max(self._before, peak), peak
        return max(allocated, self._before)

    def begin_anew(self) -> None:
        """What is allocated now is the peak, until it rises or `restore` is called."""
        _, peak, _ = self._device.memory()
        if self.exact:
            self._begun_anew_from = max(self._begun_anew_from, peak)
        self._true = max(self._true or 0, peak)
        self._device.reset_peak()

    @contextlib.contextmanager
    def measured(self) -> Iterator[Callable[[], int]]:
        """Calls of what it gives tell the most that was allocated inside. Others see no difference."""
        if self.exact:
            self._before = max(self._before, self._device.memory()[1])
        self.begin_anew()
        most = 0

        def told() -> int:
            return most

        try:
            yield told
        finally:
            _, most, _ = self._device.memory()
            self.restore()

    def restore(self) -> None:
        """Has torch tell of the peak that it would have if it had not begun anew."""
        if self._true is None:
            return
        allocated, peak, _ = self._device.memory()
        self._before = max(self._before, peak)
        true, self._true = max(self._true, peak), None
        if true > peak:
            _fill(self._device, true - allocated)
        self._told = self._device.memory()[1]


def _fill(device: Device, nbytes: int) -> None:
    """Allocates so many bytes for a moment, of what torch's pool has free, so that it does not grow.

    Where the free pieces cannot be put together to as much, it is up to 1 MiB less.
    """
    large, small = device.free_pieces()
    held = []

    def take(most: int) -> int:
        piece = most // _GRAIN * _GRAIN
        if piece:
            held.append(device.empty(piece - _PADDING, torch.uint8))
        return piece

    try:
        while nbytes > _SMALL and (part := _part(large, nbytes)):
            nbytes -= take(part)
        for piece in small:
            while taken := take(min(piece, nbytes, _SMALL)):
                nbytes -= taken
                piece -= taken
    except torch.OutOfMemoryError:
        return  # another thread has taken a piece: the peak stays a little lower


def _part(pieces: list[int], nbytes: int) -> int:
    """What to allocate next of so many bytes. It is taken from the pieces; 0 where none of them can give any.

    torch's pool gives the smallest piece that is large enough, and all of it if little would be left.
    """
    larger = min((piece for piece in pieces if piece >= nbytes), default=0)
    smaller = max((piece for piece in pieces if _SMALL < piece < nbytes), default=0)
    if larger == nbytes:
        part = piece = larger
    elif larger > nbytes + _SMALL:
        part, piece = nbytes, larger
    elif smaller:
        part = piece = smaller
    else:
        part, piece = larger - _SMALL - _GRAIN, larger
    if part <= _SMALL:
        return 0
    pieces.remove(piece)
    if piece > part:
        pieces.append(piece - part)
    return part
