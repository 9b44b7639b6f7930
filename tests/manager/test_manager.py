"""What a manager refuses, what it tells, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from emulator.tests.launch import HANGS_S
from tests.conftest import EMULATED, Link, MakeManager
from tests.models import same, stack, take_gradients
from tiered_mem import DeviceUnavailable, PolicyError, TieringManager
from tiered_mem.choose_policy import NAMES, PolicyChoice
from tiered_mem.device.device import Device
from tiered_mem.policies import Action, Event, LayerOrderPolicy, LRUPolicy, Offload, Release, Reload, Saved

SMALL = "16MiB"


def test_an_unknown_policy(device: str) -> None:
    with pytest.raises(ValueError, match="unknown policy 'magic'; known are 'auto', 'layer-order'"):
        TieringManager(policy="magic", device=device, host_bytes=SMALL)


def test_an_unknown_device() -> None:
    with pytest.raises(ValueError, match="unknown device 'tpu'; known are npu, cuda, cpu"):
        TieringManager(policy="layer-order", device="tpu", host_bytes=SMALL)


def test_a_device_that_is_not_there(device: str) -> None:
    with pytest.raises(DeviceUnavailable, match=f"'{device}:64' asked for, but this machine has"):
        TieringManager(policy="layer-order", device=f"{device}:64", host_bytes=SMALL)


@pytest.mark.parametrize("host_bytes", [0, -1, "0GiB", "-3MiB"])
def test_a_host_tier_of_nothing(device: str, host_bytes: int | str) -> None:
    with pytest.raises(ValueError, match=f"at least 1 byte, not {host_bytes!r}"):
        TieringManager(policy="layer-order", device=device, host_bytes=host_bytes)


def test_a_host_tier_larger_than_the_machine(device: str) -> None:
    too_much = psutil.virtual_memory().total + (1 << 30)
    with pytest.raises(ValueError, match=f"host_bytes={too_much} is .* GiB, more than .* allows \\(.* GiB\\)"):
        TieringManager(policy="layer-order", device=device, host_bytes=too_much)


def test_a_size_that_is_none(device: str) -> None:
    with pytest.raises(ValueError, match="'plenty' is not a size"):
        TieringManager(policy="layer-order", device=device, host_bytes="plenty")


def test_more_layers_than_the_model_has(device: str) -> None:
    model, _ = stack(3, device)
    with (
        TieringManager(policy=LayerOrderPolicy(offload=4), device=device, host_bytes=SMALL) as manager,
        pytest.raises(ValueError, match=r"offload=4\) offloads more layers than the model has \(3\)"),
    ):
        manager.offload_context(model.layers)


def test_a_policy_that_answers_nonsense(device: str) -> None:
    class Nonsense(LayerOrderPolicy):
        def decide(self, event: Event) -> Sequence[Action]:
            return ["offload everything"]  # type: ignore[list-item]

    model, x = stack(1, device)
    with (
        TieringManager(policy=Nonsense(), device=device, host_bytes=SMALL) as manager,
        pytest.raises(PolicyError, match="Nonsense answered 'offload everything', which is not an action"),
        manager.offload_context(model.layers),
    ):
        model(x)


def test_a_policy_that_fails_at_a_save_leaves_no_block(device: str) -> None:
    class Failing(LayerOrderPolicy):
        def decide(self, event: Event) -> Sequence[Action]:
            if isinstance(event, Saved):
                raise ZeroDivisionError
            return ()

    model, x = stack(1, device)
    with TieringManager(policy=Failing(), device=device, host_bytes=SMALL) as manager:
        with pytest.raises(ZeroDivisionError), manager.offload_context(model.layers, min_bytes=1024):
            model(x)
        assert manager.stats()["device.blocks.current"] == 0


@pytest.mark.usefixtures("no_gc")
def test_the_worst_policy_costs_no_number(device: str) -> None:
    """It gives every advice about every block, at every event, in an order that makes no sense."""

    class Worst:
        def __init__(self) -> None:
            self.keys: list[int] = []

        def check(self, num_layers: int) -> None:
            """Any number suits."""

        def decide(self, event: Event) -> list[Action]:
            if isinstance(event, Saved):
                self.keys.extend(key for key, _ in event.blocks)
            every = [Release, Offload, Release, Reload, Offload]
            return [advice(key) for advice in every for key in reversed(self.keys)] + [Reload(-1)]

    model, x = stack(3, device)
    model(x).backward()
    expected = take_gradients(model)
    with TieringManager(policy=Worst(), device=device, host_bytes="64MiB") as manager:
        offload = manager.offload_context(model.layers, min_bytes=1024)
        with offload:
            loss = model(x)
        loss.backward()
    assert same(take_gradients(model), expected)


def test_stats_and_summary(device: str) -> None:
    model, x = stack(2, device)
    with TieringManager(policy="layer-order", device=device, host_bytes=SMALL) as manager:
        offload = manager.offload_context(model.layers, min_bytes=1024)
        with offload:
            loss = model(x)
        inside = manager.stats()
        loss.backward()
        manager.synchronize()
        after = manager.stats()
        text = manager.memory_summary()
    assert inside["host.capacity"] == 16 << 20
    assert inside["host.used.current"] == inside["host.used.peak"] == after["host.used.peak"]
    assert inside["host.bytes.current"] == inside["offloaded.bytes.total"] == inside["released.bytes.total"]
    assert inside["device.blocks.current"] == inside["reloaded.blocks.total"] == 0
    assert after["reloaded.bytes.total"] == inside["offloaded.bytes.total"]
    assert str(after["host.source"]) in text
    assert "reloads on demand" in text


def test_a_closed_manager_holds_no_memory(device: str) -> None:
    model, x = stack(2, device)
    manager = TieringManager(policy="layer-order", device=device, host_bytes=SMALL)
    with manager.offload_context(model.layers, min_bytes=1024):
        loss = model(x)
    manager.close()
    manager.close()
    assert manager.stats()["host.reserved.current"] == 0
    del loss


def test_policies_have_names() -> None:
    """The cpu counts no memory, of which the others would take a share."""
    found = [PolicyChoice(name, None, None).on(Device("cpu"), None) for name in NAMES]
    assert [type(policy) for policy in found] == [LayerOrderPolicy, LayerOrderPolicy, LRUPolicy]


def test_a_policy_by_name_offloads_every_layer(device: str) -> None:
    model, x = stack(2, device)
    with TieringManager(policy="layer-order", device=device, host_bytes=SMALL) as manager:
        with manager.offload_context(model.layers, min_bytes=1024):
            loss = model(x)
        assert manager.stats()["device.blocks.current"] == 0
        loss.backward()


def test_the_cpu_as_a_plain_fallback() -> None:
    model, x = stack(3, "cpu")
    model(x).backward()
    expected = take_gradients(model)
    with TieringManager(policy="layer-order", device="cpu", host_bytes=SMALL) as manager:
        with manager.offload_context(model.layers, min_bytes=1024):
            loss = model(x)
        assert int(manager.stats()["host.blocks.current"]) > 0
        loss.backward()
        assert manager.stats()["host.source"] == "PageableMemory"
    assert same(take_gradients(model), expected)


PINNED = """
import torch
from tiered_mem import TieringManager
from tiered_mem.policies import Offload, Policy, Saved

class Now(Policy):
    gather_bytes = 1
    def decide(self, event): return [Offload(key) for key, _ in event.blocks] if isinstance(event, Saved) else []

with TieringManager(policy=Now(), device="npu", host_bytes="48MiB") as manager:
    tensor = torch.randn(1 << 20).to("npu")
    block, _ = manager._activations.save(tensor, graph=0, layer=0)
    stats = manager.stats()
    print(stats["host.source"], stats["host.reserved.current"], block.host.tensor.is_pinned())
    manager.synchronize()
    print(torch.equal(block.host.tensor.view(torch.float32), tensor.cpu()))
    manager._activations.dropped.append(block)
    manager._activations.free_dropped()
"""


@pytest.mark.slow(why="a process imports torch")
@pytest.mark.skipif(not EMULATED, reason="the emulated device alone has an old stack")
@pytest.mark.parametrize(
    ("stack_version", "source"), [("current", "AclPinnedMemory"), ("old", "TorchPinnedMemory")]
)
def test_where_pinned_memory_comes_from(stack_version: str, source: str, tmp_path: Any) -> None:
    """An old stack does not see that memory from ctypes is pinned; then whole powers of two come from torch."""
    script = tmp_path / "pinned.py"
    script.write_text(PINNED)
    command = [sys.executable, "-m", "ascend_emulator", "--stack", stack_version, str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"{source} {48 << 20} True", "True"]


def test_a_manager_that_is_forgotten_frees_its_memory_after_the_copies(
    device: str, link: Link, no_gc: None
) -> None:
    model, x = stack(2, device)
    manager = TieringManager(policy="layer-order", device=device, host_bytes="64MiB")
    pool = weakref.ref(manager._host._pool)
    link("50MB/s")
    with manager.offload_context(model.layers, min_bytes=1024):
        loss = model(x)
    del manager, loss  # its copies are under way; if the memory went first, they would write where others are
    assert pool() is None


def test_a_trace_is_asked_for_in_advance(device: str, make_manager: MakeManager, tmp_path: Path) -> None:
    manager = make_manager()
    assert "trace=True" in manager.memory_summary()
    with pytest.raises(RuntimeError, match="trace=True"):
        manager.export_trace(tmp_path / "trace.json")


def test_a_trace_of_a_step(device: str, tmp_path: Path) -> None:
    model, x = stack(3, device)
    with TieringManager(policy="layer-order", device=device, host_bytes="64MiB", trace=True) as manager:
        with manager.offload_context(model.layers, min_bytes=1024):
            loss = model(x)
        loss.backward()
        moved = int(manager.stats()["offloaded.bytes.total"])
        manager.export_trace(tmp_path / "trace.json")
        assert "hidden" in manager.memory_summary()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    layers = [f"forward {i}" for i in range(3)] + [f"backward {i}" for i in (2, 1, 0)]
    assert [span["name"] for span in spans if span["name"] in layers] == layers
    for direction in ("offload", "reload"):
        copies = [span for span in spans if span["name"] == direction and "bytes" in span["args"]]
        assert sum(copy["args"]["bytes"] for copy in copies) == moved > 0


def test_the_last_layer_of_a_backward_ends_with_it(device: str, tmp_path: Path) -> None:
    """What comes after, an optimizer's step perhaps, is no layer's."""
    model, x = stack(2, device)
    with TieringManager(policy="layer-order", device=device, host_bytes="64MiB", trace=True) as manager:
        offload = manager.offload_context(model.layers, min_bytes=1024)
        for _ in range(2):
            with offload:
                loss = model(x)
            loss.backward()
            for _ in range(200):
                x = x * 1
        manager.export_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {event["name"]: event for event in reversed(events) if event["ph"] == "X"}
    second = [event for event in events if event["ph"] == "X" and event["name"] == "forward 0"][1]
    ended = spans["backward 0"]["ts"] + spans["backward 0"]["dur"]
    assert ended < second["ts"]
