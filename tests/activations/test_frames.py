"""How many Python functions run for a tensor on its way: each costs the training thread time, tensor by tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest
import torch
import torch._dynamo  # as whoever makes an optimizer

from tests.models import allocated
from tiered_mem import TieringManager
from tiered_mem.activations.hooks import ForwardPass
from tiered_mem.policies import (
    LayerOrderPolicy,
    Link,
    LRUPolicy,
    PlannedPolicy,
    Policy,
    SynchronizationDictPolicy,
)

NBYTES = 1 << 16
TENSORS = 16  # of a layer
LAYERS = 3
MIB = 1 << 20
SAVED = NBYTES * TENSORS * LAYERS
LINK = Link(4e9, 4e9)
NOT_COUNTED = (__file__, contextmanager.__code__.co_filename)


class Frames:
    """Counts the functions written in Python that this thread calls while it is entered."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        def look(frame: FrameType, what: str, of: object) -> None:
            file = frame.f_code.co_filename
            if what == "call" and file not in NOT_COUNTED and "ascend_emulator" not in file:
                self.names.append(frame.f_code.co_name)

        sys.setprofile(look)
        try:
            yield
        finally:
            sys.setprofile(None)


class Pass:
    """A forward and a backward of layers that save tensors, call by call. All of them leave the device."""

    def __init__(self, manager: TieringManager) -> None:
        movable = manager._contexts.movable(min_bytes=NBYTES)
        self._forward = ForwardPass(manager._activations, movable, LAYERS)
        self._hooks = self._forward.hooks()  # what torch calls
        self._manager = manager
        self._kind = manager.device.torch_device
        self.frames = Frames()
        self.pack: list[str] = []
        self.unpack, self.drop = Frames(), Frames()

    def run(self) -> None:
        saved = [self._save_layer() for _ in range(LAYERS)]
        with self.frames.counted():
            self._forward.end()
        for layer in reversed(saved):
            while layer:
                with self.frames.counted():
                    self._hooks.unpack_hook(layer[-1])
                    layer.pop()
        with self.frames.counted():
            self._manager.synchronize()

    def run_apart(self) -> None:
        """As `run`, and tells apart what runs for the last tensor of a layer that left."""
        saved = [self._save_layer() for _ in range(LAYERS)]
        self._forward.end()
        for layer in reversed(saved):
            while layer:
                last = layer.pop()
                self.unpack, self.drop = Frames(), Frames()
                with self.unpack.counted():
                    self._hooks.unpack_hook(last)
                with self.drop.counted():
                    del last

    def _save_layer(self) -> list[object]:
        # What an operation has made of a tensor that wants a gradient, as most of what layers save.
        leaf = torch.ones(NBYTES // 4, device=self._kind, requires_grad=True)
        tensors = [leaf * 1 for _ in range(TENSORS)]
        saved: list[object] = []
        with self.frames.counted():
            number = self._forward.begin_layer()
        for tensor in tensors:
            before = len(self.frames.names)
            with self.frames.counted():
                saved.append(self._hooks.pack_hook(tensor))
            self.pack = self.frames.names[before:]
        del tensor, tensors
        with self.frames.counted():
            self._forward.end_layer(number)
        return saved


@pytest.fixture
def passing(device: str) -> Iterator[Pass]:
    with TieringManager(policy=LayerOrderPolicy(in_flight=1), device=device, host_bytes="16MiB") as manager:
        Pass(manager).run()  # what is only done once
        yield Pass(manager)


def test_a_tensor_on_its_own(passing: Pass) -> None:
    passing.run_apart()
    assert len(passing.pack) <= 8, passing.pack
    assert len(passing.unpack.names) <= 5, passing.unpack.names
    assert len(passing.drop.names) <= 5, passing.drop.names


SCHEDULE = {0: (True, 2, False, 0), 1: (True, 2, False, 1)}
MEASURED = pytest.mark.schedules("eager", why="a planned step needs the times of one before it, which end late")
MOST: dict[str, tuple[Callable[[int], Policy], float]] = {
    "layer order": (lambda given: LayerOrderPolicy(in_flight=1), 36),
    "layer order, nothing leaves": (lambda given: LayerOrderPolicy(0), 29),
    "by dictionary": (lambda given: SynchronizationDictPolicy(SCHEDULE), 37),
    "lru": (lambda given: LRUPolicy(SAVED // 3), 112),
    "auto, nothing leaves": (lambda given: PlannedPolicy(given + 4 * SAVED, LINK), 45),
    "auto, half leaves": (lambda given: PlannedPolicy(given + MIB + SAVED // 2, LINK, recompute=False), 130),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=MEASURED) if "auto" in n else n for n in MOST])
def test_a_round_trip(name: str, device: str) -> None:
    """With its share of what is done for a layer, in a step like those before it."""
    make, most = MOST[name]
    given = allocated()
    with TieringManager(policy=make(given), device=device, host_bytes="16MiB") as manager:
        for _ in range(6):
            Pass(manager).run()
            if device != "cpu":
                torch.accelerator.synchronize()  # or the times of a step come later, and its plan with them
        counts = []
        for _ in range(4):  # where other processes make a step slow, the next is recorded anew, and costs more
            passing = Pass(manager)
            passing.run()
            counts.append(len(passing.frames.names))
        assert min(counts) <= most * TENSORS * LAYERS
        moved = manager.stats()["offloaded.blocks.total"]
        assert (moved == 0) == ("nothing" in name)
