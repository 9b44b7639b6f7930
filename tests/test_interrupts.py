"""An interrupt comes before or after each piece of bookkeeping, never inside."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import pytest
import torch

from tests.conftest import RACES
from tests.interrupted import SIGNAL, Interrupt, Sweep, name_of
from tests.models import Stack, eventually, is_empty, small_stack
from tiered_mem import TieringManager
from tiered_mem.cpu_offload import ManualOffloadSynchronizer, OffloadableLayerState, get_cpu_offload_context
from tiered_mem.errors import Closed, Reentered
from tiered_mem.interrupts import HeldBack, Interrupts, uninterrupted, uninterrupted_codes
from tiered_mem.policies import Action, Event, LayerOrderPolicy, LRUPolicy, ManualPolicy, Offload

# What only reads, makes an object of its own, or does no more than call what is not interrupted.
HARMLESS = {
    "backward_watch.py": ["gradient_is_there"],
    "__init__.py": ["__init__", "_check_num_layers", "get_cpu_offload_context"],
    "disk_tier.py": ["capacity"],
    "layer_context.py": ["<lambda>", "__init__", "restart", "sync"],
    "layer_order.py": ["__init__", "check"],
    "layer_state.py": ["__init__", "_keys", "get_offloaded_total_size_mb", "pop_tensor"],
    "lru.py": ["check"],
    "manager.py": [
        "__enter__",
        "__exit__",
        "_movable",
        "act",
        "layer_context",
        "offload_context",
        "stayed",
    ],
    "manual.py": ["check"],
    "movable.py": ["<listcomp>", "__init__"],
    "saved_tensor.py": ["load"],
    "sizes.py": ["format_bytes", "parse_bytes"],
    "states.py": ["check"],
    "offload_context.py": ["__init__"],
    "stayed.py": ["__init__", "<dictcomp>"],
    "synchronizers.py": ["__init__", "pop_tensor"],
    "tensors.py": ["__init__", "pop", "require"],
    "tiered_optimizer.py": ["__contains__", "__getitem__", "__init__", "present", "state", "step"],
}
MAY_BE_INTERRUPTED = {f"{file}:{name}" for file, names in HARMLESS.items() for name in names}


def spilling_manager(place: str, tmp_path: Path) -> TieringManager:
    return TieringManager(
        policy=LRUPolicy(device_bytes="8KiB"),
        device=place,
        host_bytes="256KiB",
        spill_dir=tmp_path,
        spill_bytes="16MiB",
        trace=True,
    )


def train(manager: TieringManager, model: Stack, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    with manager.offload_context(model.layers, min_bytes=1):
        loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def a_training(manager: TieringManager, place: str, folder: Path) -> None:
    """Everything that a training may ask a manager for."""
    model, x = small_stack(2, place)
    with manager:
        optimizer = manager.register_optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            bucket_bytes="8KiB",
            residency="disk" if place == "cpu" else "host",
        )
        for _ in range(3):
            train(manager, model, x, optimizer)
        whole = manager.register_optimizer(torch.optim.SGD(model.parameters(), momentum=0.9), separable=False)
        for _ in range(2):
            train(manager, model, x, whole)
        whole.state[model.layers[0].norm.weight]
        with whole.present():
            """The states are where the optimizer alone has them."""
        more = torch.nn.Parameter(torch.ones(16, device=place))
        optimizer.add_param_group({"params": [more]})
        optimizer.load_state_dict(optimizer.state_dict())
        manager.offload(model)
        manager.reload(model)
        forgotten = torch.nn.Linear(4, 4, device=place)
        manager.offload(forgotten)
        del forgotten
        in_layer_contexts(manager, model, x)
        manager.synchronize()
        manager.stats()
        manager.act([])
        manager.export_trace(folder / "trace.json")
        manager.memory_summary()
        del optimizer, model


def in_layer_contexts(manager: TieringManager, model: Stack, x: torch.Tensor) -> None:
    context = manager.layer_context(len(model.layers), min_bytes=1)
    with context:
        model.layers[0](x)
    context.restart()
    for layer in model.layers:
        with context:
            x = layer(x)
        x = context.sync(x)
    x.sum().backward()


def a_forgotten_manager(place: str) -> None:
    TieringManager(policy=ManualPolicy(), device=place, host_bytes="256KiB")


def by_the_drop_in(place: str) -> None:
    x = torch.ones(512, 1024, device=place, requires_grad=True)
    for manual in (False, True):
        context, sync, *_ = get_cpu_offload_context(
            enabled=True, num_layers=1, model_layers=3, manual_synchronization=manual, device=place
        )
        y = x
        for _ in range(3):
            with context:
                y = (y * y).sin()
            y = sync(y)
        y.sum().backward()
        context.offload_synchronizer.manager.close()


def by_hand(place: str) -> None:
    x = torch.ones(512, 1024, device=place)
    synchronizer = ManualOffloadSynchronizer(2, device=place, host_bytes="16MiB")
    pushed = []
    for layer in range(2):
        synchronizer.fwd_step()
        pushed.append(synchronizer.push_tensor(x * 2))
        synchronizer.start_offload_layer(layer)
        synchronizer.release_activation_forward_gpu_memory(layer)
    for layer in (1, 0):
        synchronizer.start_reload_layer(layer)
        synchronizer.bwd_step(layer)
        synchronizer.pop_tensor(pushed[layer])
    synchronizer.finish_part_of_bwd()
    synchronizer.manager.close()


def by_layer_states(place: str) -> None:
    with TieringManager(policy=ManualPolicy(), device=place, host_bytes="16MiB") as manager:
        state = OffloadableLayerState(manager=manager)
        pushed = state.push_tensor(torch.ones(512, 1024, device=place))
        state.start_offload()
        state.release_activation_forward_gpu_memory()
        state.start_reload()
        state.pop_tensor(pushed)
        state.get_offloaded_total_size_mb()
        state.release_all_memory()


def test_no_line_of_the_bookkeeping_sees_an_interrupt(device: str, tmp_path: Path) -> None:
    """On the cpu backward runs in this thread, and on other devices in one of its own."""
    sweep = Sweep()
    for place in dict.fromkeys((device, "cpu")):
        manager = spilling_manager(place, tmp_path)
        sweep.run(partial(a_training, manager, place, tmp_path))
    for work in (a_forgotten_manager, by_the_drop_in, by_hand, by_layer_states):
        sweep.run(partial(work, "cpu"))
    assert sweep.lines > 5000
    assert sorted(sweep.inside - MAY_BE_INTERRUPTED) == []
    # Without its mark each of the functions would have let one in.
    assert sorted(set(map(name_of, uninterrupted_codes())) - sweep.alone) == []


def test_a_sweep_can_fail() -> None:
    """Without a manager nothing keeps a handler waiting."""
    sweep = Sweep()
    sweep.run(lambda: LayerOrderPolicy(3).check(4))
    assert sweep.inside == {"layer_order.py:__init__", "layer_order.py:check"}


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
