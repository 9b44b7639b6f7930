"""No line of the bookkeeping sees an interrupt, in all that a training may ask a manager for."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.ground.interrupted import Sweep, marked, spilling_manager, train
from tests.models import Stack, small_stack
from tests.spill.disks import MIB
from tests.tiers.remote_tier import RemoteTier
from tiered_mem import TieringManager
from tiered_mem.cpu_offload import ManualOffloadSynchronizer, OffloadableLayerState, get_cpu_offload_context
from tiered_mem.policies import LayerOrderPolicy, Link, ManualPolicy, PlannedPolicy
from tiered_mem.tiers.measure import measured_tier, room_for

# What only reads, makes an object of its own, or does no more than call what is not interrupted.
HARMLESS = {
    "absence.py": ["__init__"],
    "agreement.py": ["<lambda>", "_stepped", "forward_begins"],
    "__init__.py": ["__init__", "_check_num_layers", "get_cpu_offload_context"],
    "arguments.py": ["<genexpr>", "instance", "items", "one_of", "whole_number", "yes_or_no"],
    "attachment.py": [
        *("__enter__", "__exit__", "remove"),
        *("begin_around", "begin_layer", "end_around", "end_layer"),
    ],
    "base.py": ["check"],
    "by_layer.py": ["__init__"],
    "contexts.py": [
        *("<genexpr>", "<lambda>", "<listcomp>", "__init__", "movable", "of_layers", "of_loop", "restart", "sync"),
    ],
    "device.py": ["<setcomp>", "check_some_here", "owns"],
    "disk_and_states.py": ["crossing"],
    "filesystem.py": ["memory_at", "pages"],
    "guarded.py": ["__torch_function__", "_all_guarded", "guard_of"],
    "hooks.py": ["is_checkpoint", "load"],
    "layer_order.py": ["__init__", "check"],
    "layout.py": ["params_of"],
    "profile.py": ["__post_init__"],
    "lru.py": ["check"],
    "manager.py": ["__enter__", "__exit__", "act", "away", "export_trace", "layer_context", "offload_context"],
    "measure.py": [
        *("<genexpr>", "<lambda>", "<listcomp>", "__init__"),
        *("_cut", "_link", "_release", "_round", "_wait", "link", "measured_tier"),
    ],
    "movable.py": ["<dictcomp>", "<listcomp>", "__init__", "_places_of"],
    "places.py": ["__init__"],
    "node_verdicts.py": ["wait"],
    "planned.py": ["__init__", "check"],
    "player.py": ["__init__"],
    "rates.py": ["__init__"],
    "repertoire.py": ["__init__"],
    # What runs inside of a layer's forward, or computes it again, is the user's: the call ends with the interrupt.
    "operators.py": [
        *("<genexpr>", "<listcomp>", "<setcomp>", "__enter__", "__torch_dispatch__", "_random_states", "is_dear"),
        *("_memory_of", "_numbers_of_a_draw", "load", "of", "tensors_among"),
    ],
    "call.py": ["<genexpr>", "_changed_state", "_other_now", "again", "settings"],
    "recompute.py": ["<lambda>", "_bits", "_parts", "_same_bits", "_unpack", "again", "check", "same_bits"],
    "report.py": ["__init__"],
    "resting.py": ["__getitem__", "__init__", "__len__", "_alive", "in_order"],
    # A save that is interrupted leaves the former one as it was.
    "saved_states.py": [
        *("<dictcomp>", "<genexpr>", "<listcomp>", "__init__"),
        *("_checksum", "_described", "_written", "check_can_be_saved"),
    ],
    "saved_values.py": ["__init__", "dtype_name"],
    "sizes.py": ["_parsed", "format_bytes", "parse_bytes"],
    "states.py": ["<genexpr>", "begun", "check", "keys", "version"],
    "synchronizers.py": ["__init__", "get_offloaded_total_size_mb", "pop", "pop_tensor", "require"],
    "treatments.py": ["__init__"],
    "tiered_optimizer.py": [
        "<genexpr>",
        "__getattr__",
        "_check_in_use",
        "_check_no_hooks",
        "_look",
        "call",
        "present",
        "save",
        "state",
        "step",
    ],
    "untraced.py": ["call"],
}
MAY_BE_INTERRUPTED = {f"{file}:{name}" for file, names in HARMLESS.items() for name in names}


class Knowing(torch.optim.SGD):
    """Has something beyond torch's interface."""

    def known(self) -> int:
        return len(self.state)


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
        whole = manager.register_optimizer(Knowing(model.parameters(), momentum=0.9), separable=False)
        for _ in range(2):
            train(manager, model, x, whole)
        whole.state[model.layers[0].norm.weight]
        whole.known()
        with whole.present():
            """The states are where the optimizer alone has them."""
        more = torch.nn.Parameter(torch.ones(16, device=place))
        optimizer.add_param_group({"params": [more]})
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.save(folder / place)
        optimizer.load(folder / place)
        manager.offload(model)
        manager.reload(model)
        with manager.away(model, optimizer):
            """Both are on the host."""
        forgotten = torch.nn.Linear(4, 4, device=place)
        manager.offload(forgotten)
        del forgotten
        in_layer_contexts(manager, model, x)
        by_attaching(manager, model, x)
        stepped_beside(manager, place)
        computed_again(manager, model, x)
        manager.synchronize()
        manager.stats()
        manager.act([])
        manager.export_trace(folder / "trace.json")
        manager.memory_summary()
        whole.give_back()
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


def by_attaching(manager: TieringManager, model: Stack, x: torch.Tensor) -> None:
    with manager.attach(model, min_bytes=1):
        model(x).backward()
        manager._interrupts.leave()  # as where a handler raises
        for layer in model.layers:
            x = layer(x)
        x.sum().backward()


def stepped_beside(manager: TieringManager, place: str) -> None:
    for overlap in ("backward", "forward"):
        model, x = small_stack(2, place)
        optimizer = manager.register_optimizer(
            torch.optim.AdamW(model.parameters()),
            bucket_bytes="8KiB",
            overlap=overlap,  # type: ignore[arg-type]
        )
        for _ in range(3):
            optimizer.last_backward()
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()


def computed_again(manager: TieringManager, model: Stack, x: torch.Tensor) -> None:
    layers = [torch.nn.Sequential(layer, torch.nn.ReLU(inplace=True)) for layer in model.layers]
    for how in ("full", "cheap"):
        for _ in range(3):  # with two trials
            with manager.offload_context(layers, min_bytes=1, recompute=how):
                loss = torch.nn.Sequential(*layers)(x)
            loss.sum().backward()


def recorded(place: str) -> None:
    model, x = small_stack(2, place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = PlannedPolicy("1GiB", Link(1e9, 1e9))
    with TieringManager(policy=policy, device=place, host_bytes="1MiB") as manager:
        # A signal whose handler raises would break off the forward of an attached model.
        offload = manager.offload_context(model.layers, min_bytes=1)
        for _ in range(2):
            with offload:
                loss = model(x)
            loss.backward()
            optimizer.step()


def as_one_of_two_ranks(folder: Path, place: str) -> None:
    """It says whether its budget is enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        patch.setenv("MASTER_PORT", str(folder))
        recorded(place)


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
    for work in (a_forgotten_manager, recorded, by_the_drop_in, by_hand, by_layer_states):
        sweep.run(partial(work, "cpu"))
    sweep.run(partial(as_one_of_two_ranks, tmp_path, "cpu"))
    sweep.run(partial(measured_tier, RemoteTier(room_for(MIB)), MIB))
    assert sweep.lines > 5000
    assert sorted(sweep.inside - MAY_BE_INTERRUPTED) == []
    # Without any one of the marks the line above would fail.
    needed = {keeper for keeper, inside in sweep.alone if inside not in MAY_BE_INTERRUPTED}
    assert sorted(marked() - needed) == []


def test_a_sweep_can_fail() -> None:
    """Without a manager nothing keeps a handler waiting."""
    sweep = Sweep()
    sweep.run(lambda: LayerOrderPolicy(3).check(4))
    policy = {"by_layer.py:__init__", "layer_order.py:__init__", "layer_order.py:check", "places.py:__init__"}
    assert sweep.inside == policy | {"arguments.py:whole_number", "arguments.py:one_of", "arguments.py:<genexpr>"}
