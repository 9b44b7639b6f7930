"""What happens to a model's blocks under a policy, move by move.

A move is an action that the policy answers with, a copy with the bytes of each of its blocks, a stream that is made
to wait, or a file operation. Nothing here depends on time: the disk is through with each operation before the next
line of the program runs, and backward runs on the calling thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import Stack
from tests.spill.declared_files import DeclaredFiles
from tiered_mem import TieringManager
from tiered_mem.policies import Action, Event, LayerOrderPolicy, LRUPolicy, Policy, SynchronizationDictPolicy
from tiered_mem.spill.disk_tier import DiskRecord, DiskTier
from tiered_mem.spill.lower_tier import Job, Piece

MIB = 1 << 20
LAYERS = 5
STEPS = 2
FOLDER = Path(__file__).parent

# By the name of their file. Those with a number of bytes for the host tier go on to disk. They run on the CPU: on a
# device the time at which a copy ends decides when a block may be written.
POLICIES: dict[str, tuple[Callable[[], Policy], int | None]] = {
    "layer_order": (lambda: LayerOrderPolicy(2), None),
    "layer_order_all": (lambda: LayerOrderPolicy(), None),
    "layer_order_disk": (lambda: LayerOrderPolicy(4, in_flight=0), 3 * MIB),
    "lru": (lambda: LRUPolicy(device_bytes=2 * MIB), None),
    "lru_disk": (lambda: LRUPolicy(device_bytes=1 * MIB, read_ahead=MIB), 2 * MIB),
    "synchronization_dict": (
        lambda: SynchronizationDictPolicy({0: (True, 2, False, 2), 1: (True, 3, False, 3)}),
        None,
    ),
}


class Moves:
    """The lines of a record."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._streams: dict[int, str] = {}

    def add(self, *words: object) -> None:
        self.lines.append(" ".join(map(str, words)))

    def waits(self, stream: Any) -> None:
        name = self._streams.setdefault(stream.stream_id, f"side {len(self._streams)}")
        self.add("wait", name)

    @contextmanager
    def recorded(self, compute: Any) -> Iterator[None]:
        """compute: the stream that is called so."""
        self._streams[compute.stream_id] = "compute"
        inline = {vars(type(compute))["wait_event"].__code__} if not isinstance(compute, torch.Stream) else set()

        def look(frame: FrameType, what: str, of: Any) -> None:
            if what == "c_call" and getattr(of, "__name__", "") == "wait_event":
                self.waits(of.__self__)
            elif what == "call" and frame.f_code in inline:
                self.waits(frame.f_locals["self"])

        with _Copies(self), torch.autograd.set_multithreading_enabled(False):
            sys.setprofile(look)
            try:
                yield
            finally:
                sys.setprofile(None)


class _Copies(TorchDispatchMode):
    def __init__(self, moves: Moves) -> None:
        super().__init__()
        self._moves = moves

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._foreach_copy_.default:
            self._moves.add("copy", *(tensor.nbytes for tensor in args[1]))
        return function(*args, **(kwargs or {}))


class _Told(Policy):
    """A policy whose answers are recorded."""

    def __init__(self, policy: Policy, moves: Moves) -> None:
        self._policy = policy
        self._moves = moves
        self.follow = policy.follow

    def decide(self, event: Event) -> Sequence[Action]:
        answer = self._policy.decide(event)
        for kind, group in groupby(answer, type):
            self._moves.add(kind.__name__.lower(), *(action.key for action in group))
        return answer


class _DiskAtOnce(DiskTier):
    """A disk tier that is through with an operation when the call returns."""

    def __init__(self, folder: Path, moves: Moves) -> None:
        super().__init__(folder, capacity=64 * MIB, files=DeclaredFiles())
        self._moves = moves

    def write(self, pieces: Sequence[Piece], **about: Any) -> DiskRecord:
        record = super().write(pieces, **about)
        record.job.wait()
        self._moves.add("written", *(piece.nbytes for piece in pieces))
        return record

    def read(self, record: DiskRecord, wanted: Sequence[tuple[int, int]]) -> Job:
        job = super().read(record, wanted)
        job.wait()
        self._moves.add("read", *(index for index, _ in wanted))
        return job


def moves_of(name: str, device: str, folder: Path) -> list[str]:
    """What happens in two steps of a small model. folder: an empty one, for spill files."""
    policy, host_bytes = POLICIES[name]
    if host_bytes is not None:
        device = "cpu"
    moves = Moves()
    torch.manual_seed(0)
    model = Stack(LAYERS).to(device)
    x = torch.randn(4, 64, 64).to(device)
    disk = None if host_bytes is None else _DiskAtOnce(folder, moves)
    with TieringManager(
        policy=_Told(policy(), moves), device=device, host_bytes=host_bytes or "16MiB", disk=disk
    ) as manager:
        context = manager.offload_context(model.layers, min_bytes=1024)
        for step in range(STEPS):
            with moves.recorded(manager.device.current_stream()):
                moves.add("# forward", step)
                with context:
                    loss = model(x)
                moves.add("# backward", step)
                loss.backward()
                del loss
            manager.synchronize()
        stats = manager.stats()
    for what in ("offloaded", "released", "reloaded", "kept", "spilled", "fetched"):
        if f"{what}.blocks.total" in stats:
            moves.add(f"# {what}", stats[f"{what}.blocks.total"], "blocks", stats[f"{what}.bytes.total"], "bytes")
    return moves.lines


def file_of(name: str) -> Path:
    return FOLDER / f"{name}.txt"
