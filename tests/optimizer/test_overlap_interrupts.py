"""Interrupts at random instants of a training whose steps are made in backward, or beside the next forward."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch

from tests.optimizer.conftest import MakeTiered
from tests.optimizer.training import Outcome, backward, differences, make_params, outcome
from tiered_mem.errors import InterruptedStep

SHAPES = [(32, 24), (24,), (48, 16), (), (40, 20), (64,)]


class Interrupter:
    """Raises KeyboardInterrupt in the main thread. raised: how often it has."""

    def __init__(self) -> None:
        self._expected = False
        self.raised = 0

    @contextmanager
    def after(self, seconds: float) -> Iterator[None]:
        """About so long from now, unless that is after the end."""
        self._expected = True
        main = threading.main_thread().ident
        assert main is not None

        def send() -> None:
            time.sleep(seconds)
            signal.pthread_kill(main, signal.SIGUSR1)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            yield
        finally:
            self._expected = False
            sender.join()

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self._expected and not _in_race_detector(frame):
            self._expected = False
            self.raised += 1
            raise KeyboardInterrupt


def _in_race_detector(frame: FrameType | None) -> bool:
    """Where C++ has called Python, and swallows what is raised."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("ascend_emulator/races.py"):
            return True
        frame = frame.f_back
    return False


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    interrupter = Interrupter()
    before = signal.signal(signal.SIGUSR1, interrupter.handle)
    yield interrupter
    signal.signal(signal.SIGUSR1, before)


def _users_own(gradient: torch.Tensor) -> None:
    """On the CPU backward runs in the main thread, and an interrupt may end it here."""
    sum(range(20000))


class Plain:
    """The same training without tiering and interrupts. before, after: of its last step."""

    def __init__(self, device: str) -> None:
        self._params = make_params(device, shapes=SHAPES)
        self._optimizer = torch.optim.AdamW(self._params, lr=1e-2)
        self.after = self._outcome()

    def train(self, step: int) -> None:
        self.before = self.after
        backward(self._params, step)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.after = self._outcome()

    def _outcome(self) -> Outcome:
        found = outcome(self._optimizer, self._params)
        return Outcome([value.clone() for value in found.params], found.state_dict)


def _load(optimizer: Any, params: list[torch.nn.Parameter], saved: Outcome) -> None:
    """A checkpoint of the model and the optimizer."""
    optimizer.load_state_dict(saved.state_dict)
    optimizer.zero_grad()
    with torch.no_grad():
        for param, value in zip(params, saved.params, strict=True):
            param.copy_(value)


def _in_use(device: str, make_tiered: MakeTiered) -> tuple[int, float]:
    """Bytes of device memory, and slots of host memory."""
    make_tiered.manager.synchronize()
    gc.collect()  # what tests before this one have left
    allocated = 0 if device == "cpu" else torch.get_device_module(device).memory_allocated()
    return allocated, make_tiered.manager.stats()["host.slots"]


@pytest.mark.parametrize(
    "times", [8, pytest.param(100, marks=pytest.mark.slow(why="interrupts come at random, and so must be many"))]
)
@pytest.mark.parametrize("overlap", ["backward", "forward"])
@pytest.mark.parametrize("residency", ["host", "disk"])
def test_each_interrupt_leaves_a_step_that_goes_on_or_a_clear_error(
    residency: str, overlap: Any, times: int, device: str, make_tiered: MakeTiered, interrupter: Interrupter
) -> None:
    plain, chance = Plain(device), random.Random(0)
    params = make_params(device, shapes=SHAPES)
    for param in params:
        param.register_hook(_users_own)  # type: ignore[no-untyped-call]
    tiered = make_tiered(
        torch.optim.AdamW(params, lr=1e-2), residency=residency, bucket_bytes=8192, overlap=overlap
    )
    usual, found = 0.01, Counter[str]()
    for step in range(2):  # one is learned from, and in the other all comes to be that is to stay
        plain.train(step)
        _train(tiered, params, step)
    used = _in_use(device, make_tiered)
    while found["interrupts"] < times:
        step += 1
        assert step < 20 * times, found
        plain.train(step)
        began = time.perf_counter()
        try:
            with interrupter.after(chance.uniform(0, usual)):
                _train(tiered, params, step)
        except KeyboardInterrupt:
            found["interrupts"] += 1
            _go_on(tiered, params, plain, found)
            if differences(plain.after, outcome(tiered, params)):
                _train(tiered, params, step)  # once more, from before the step
        else:
            usual = 0.8 * usual + 0.2 * (time.perf_counter() - began)
        assert not differences(plain.after, outcome(tiered, params))
    assert interrupter.raised == found["interrupts"], "one was lost"
    assert times < 100 or overlap == "forward" or found["went on"] + found["a clear error"] > 10, found
    assert _in_use(device, make_tiered) == used


def _train(tiered: Any, params: list[torch.nn.Parameter], step: int) -> None:
    backward(params, step)
    tiered.step()
    tiered.zero_grad()


def _go_on(tiered: Any, params: list[torch.nn.Parameter], plain: Plain, found: Counter[str]) -> None:
    """With the step, if a part of it has been made, or from a checkpoint if it cannot."""
    try:
        if tiered.overlap == "forward":
            tiered.finish()
        elif tiered.states.begun:
            tiered.step()
            found["went on"] += 1
            assert not differences(plain.after, outcome(tiered, params))
        tiered.zero_grad()
    except InterruptedStep:
        found["a clear error"] += 1
        _load(tiered, params, plain.before)
    assert any(not differences(side, outcome(tiered, params)) for side in (plain.before, plain.after))
