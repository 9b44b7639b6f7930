"""An interrupt comes before or after each piece of bookkeeping, never inside."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch

from tests.conftest import RACES
from tests.ground.interrupted import SIGNAL, Interrupt, spilling_manager, train
from tests.models import Stack, eventually, is_empty, small_stack
from tiered_mem import TieringManager
from tiered_mem.activations.hooks import SavedTensor
from tiered_mem.errors import Closed, Reentered
from tiered_mem.ground.interrupts import HeldBack, Interrupts, uninterrupted
from tiered_mem.policies import Action, Event, LayerOrderPolicy, Offload


@contextmanager
def handler(answer: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = signal.signal(SIGNAL, answer)
    try:
        yield
    finally:
        signal.signal(SIGNAL, before)


def raising(number: int, frame: FrameType | None) -> None:
    raise Interrupt


@pytest.mark.skipif(RACES, reason="the detector asks Python where work is from, and ctypes swallows what is raised")
@pytest.mark.parametrize("first", ["manager", "handler"])
def test_a_handler_that_raises_comes_after_the_bookkeeping(first: str, device: str) -> None:
    class Sends:
        """A policy in whose midst the signal comes."""

        def check(self, num_layers: int) -> None:
            """Any number suits."""

        def decide(self, event: Event) -> list[Action]:
            if not decided:
                signal.raise_signal(SIGNAL)
            decided.append(event)
            return []

    decided: list[Event] = []

    def make() -> TieringManager:
        return TieringManager(policy=Sends(), device=device, host_bytes="1MiB")

    manager = make() if first == "manager" else None
    with handler(raising):
        manager = manager or make()
        model, x = small_stack(2, device)
        with pytest.raises(Interrupt):
            interrupted_forward(manager, model, x)
        assert decided
        assert eventually(lambda: is_empty(manager))
        assert not any(layer._forward_hooks for layer in model.layers)
        manager.close()


def interrupted_forward(manager: TieringManager, model: Stack, x: torch.Tensor) -> None:
    with manager.offload_context(model.layers):
        model(x)
    wait_for_the_interrupt()


def wait_for_the_interrupt() -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(1e-3)


def test_a_handler_that_asks_the_manager_is_answered(device: str, tmp_path: Path) -> None:
    with spilling_manager(device, tmp_path) as manager:
        model, x = small_stack(2, device)
        optimizer = manager.register_optimizer(torch.optim.AdamW(model.parameters()), bucket_bytes="4KiB")
        train(manager, model, x, optimizer)
        expected = optimizer.state_dict()["param_groups"]
        answers: list[object] = []

        def asks(number: int, frame: FrameType | None) -> None:
            answers.append((manager.stats()["device.blocks.current"], optimizer.state_dict()["param_groups"]))

        sent = 0

        def send(*_: object) -> None:
            nonlocal sent
            sent += 1
            signal.raise_signal(SIGNAL)

        with handler(asks):
            for hook in (model.layers[0].register_forward_hook, optimizer.wrapped.register_step_post_hook):
                hook(send)
            train(manager, model, x, optimizer)
            assert eventually(lambda: bool(answers))
        assert sent
        assert answers[0][1] == expected


def test_a_handler_may_close_the_manager(device: str) -> None:
    manager = TieringManager(policy="layer-order", device=device, host_bytes="8MiB")
    model, x = small_stack(3, device)

    def closes(number: int, frame: FrameType | None) -> None:
        manager.close()

    def train_on() -> None:
        with manager.offload_context(model.layers, min_bytes=1):
            loss = model(x)
            signal.raise_signal(SIGNAL)
        loss.backward()

    with handler(closes), pytest.raises(Closed):
        train_on()


def test_an_interrupt_in_a_finalizer_is_not_swallowed() -> None:
    interrupts = Interrupts()
    ended: list[int] = []

    class Dying:
        @uninterrupted
        def __del__(self) -> None:
            signal.raise_signal(SIGNAL)
            ended.append(1)

    def die() -> None:
        Dying()
        wait_for_the_interrupt()

    with handler(raising):
        interrupts.watch()
        with pytest.raises(Interrupt):
            die()
        assert ended == [1]
        interrupts.close()


def test_no_finalizer_of_a_step_swallows_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python prints what a finalizer raises and goes on. Torch has such, which are not for us to call."""
    swallowed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)
    deaths: list[type] = []
    sent_in: int | None = None

    def send(frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code.co_name == "__del__":
            deaths.append(type(frame.f_locals["self"]))
            if len(deaths) - 1 == sent_in:
                signal.raise_signal(SIGNAL)

    def step() -> None:
        deaths.clear()
        sys.settrace(send)
        try:
            model(x).backward()
        finally:
            sys.settrace(None)
        if sent_in is not None:
            wait_for_the_interrupt()

    model, x = small_stack(2, "cpu")
    with (
        TieringManager(policy="layer-order", device="cpu", pin=False, host_bytes="8MiB") as manager,
        manager.attach(model, min_bytes=1),
        handler(raising),
    ):
        step()
        assert SavedTensor in deaths
        for number in range(len(deaths)):
            sent_in = number
            with pytest.raises(Interrupt):
                step()
    assert swallowed == []


def test_an_interrupt_while_gradients_are_counted_leaves_no_graph(tmp_path: Path) -> None:
    """On the cpu, where backward runs in this thread. Autograd would keep what comes after a hook that raised."""
    model, x = small_stack(4, "cpu")
    with spilling_manager("cpu", tmp_path) as manager:
        context = manager.offload_context(model.layers, min_bytes=1)
        adamw = torch.optim.AdamW(model.parameters())
        optimizer = manager.register_optimizer(adamw, residency="disk", bucket_bytes="8KiB")
        optimizer.step()  # the next one learns where gradients come

        def send(frame: FrameType, event: str, arg: object) -> None:
            if frame.f_code.co_name == "gradient_is_there" and frame.f_locals["param"] is model.layers[2].down.bias:
                sys.settrace(None)
                signal.raise_signal(SIGNAL)

        def step() -> None:
            with context:
                loss = model(x)
            sys.settrace(send)
            loss.backward()
            wait_for_the_interrupt()

        with handler(raising), pytest.raises(Interrupt):
            step()
        stats = manager.stats()
        assert not any(stats[name] for name in stats if name.endswith("blocks.current"))


def test_a_closure_that_an_optimizer_calls_can_be_interrupted(device: str) -> None:
    model, x = small_stack(2, device)

    def closure() -> float:
        with pytest.raises(Interrupt):
            signal.raise_signal(SIGNAL)
        calls.append(1)
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        return loss.item()

    calls: list[int] = []
    with TieringManager(policy="lru", device=device, host_bytes="8MiB") as manager, handler(raising):
        optimizer = manager.register_optimizer(torch.optim.LBFGS(model.parameters(), max_iter=2))
        optimizer.step(closure)
    assert len(calls) >= 2


def test_two_signals_at_once_are_two_calls() -> None:
    calls: list[int] = []
    interrupts = Interrupts()

    @uninterrupted
    def work() -> None:
        for number in (signal.SIGUSR1, SIGNAL, SIGNAL):
            signal.raise_signal(number)
        assert calls == []

    before = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    with handler(lambda number, frame: calls.append(number)):
        interrupts.watch()
        work()
        assert eventually(lambda: len(calls) == 2)
        assert sorted(calls) == sorted([signal.SIGUSR1, SIGNAL])  # equal ones that wait are one, as in Unix
        interrupts.close()
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("holds", [False, True])
def test_handlers_are_left_alone_where_the_user_wants_that(device: str, holds: bool) -> None:
    def handlers() -> list[object]:
        return [signal.getsignal(number) for number in sorted(signal.valid_signals())]

    model, x = small_stack(3, device)
    with handler(raising):
        before = handlers()
        assert raising in before
        with TieringManager(
            policy=LayerOrderPolicy(), device=device, host_bytes="8MiB", hold_signals=holds
        ) as manager:
            seen = [handlers()]
            optimizer = manager.register_optimizer(torch.optim.Adam(model.parameters()))
            with manager.offload_context(model.layers):
                loss = model(x).sum()
            seen.append(handlers())
            loss.backward()
            optimizer.step()
            manager.synchronize()
            seen.append(handlers())
        assert handlers() == before
    assert all((each == before) is not holds for each in seen)


def test_handlers_are_as_they_were_when_the_last_manager_is_closed(device: str) -> None:
    with handler(raising):
        first, second = (TieringManager(policy="lru", device=device, host_bytes="1MiB") for _ in range(2))
        held = signal.getsignal(SIGNAL)
        assert isinstance(held, HeldBack)
        assert held.handler is raising
        first.close()
        assert signal.getsignal(SIGNAL) is held
        second.close()
        assert signal.getsignal(SIGNAL) is raising
        first.stats()
        assert signal.getsignal(SIGNAL) is raising


def test_a_forgotten_manager_leaves_the_handlers_too(device: str, no_gc: None) -> None:
    with handler(raising):
        manager = TieringManager(policy="lru", device=device, host_bytes="1MiB")
        assert signal.getsignal(SIGNAL) is not raising
        del manager
        assert signal.getsignal(SIGNAL) is raising


def test_other_threads_find_no_handlers(device: str) -> None:
    """Only the main thread may set them; a manager that was made elsewhere has it do so later."""
    managers: list[TieringManager] = []

    def make() -> None:
        managers.append(TieringManager(policy="lru", device=device, host_bytes="1MiB"))
        managers[0].stats()

    with handler(raising):
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        assert signal.getsignal(SIGNAL) is raising
        managers[0].stats()
        assert isinstance(signal.getsignal(SIGNAL), HeldBack)
        managers[0].close()


def test_a_policy_that_calls_its_manager_is_refused(device: str) -> None:
    class Asks(LayerOrderPolicy):
        def decide(self, event: Event) -> list[Action]:
            manager.act([Offload(0)])
            return []

    manager = TieringManager(policy=Asks(), device=device, host_bytes="1MiB")
    model, x = small_stack(2, device)
    with pytest.raises(Reentered, match="running itself"), manager.offload_context(model.layers):
        model(x)
    manager.close()
