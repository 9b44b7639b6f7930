"""A manager draws the steps that it has recorded, and writes the same into its trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.models import stack
from tiered_mem import TieringManager
from tiered_mem.pictures.timeline import Timeline
from tiered_mem.policies import LayerOrderPolicy

MIB = 1 << 20
LAYERS = 4


def trained(manager: TieringManager, device: str) -> None:
    model, x = stack(LAYERS, device)
    for _ in range(3):
        with manager.offload_context(model.layers, min_bytes=1 << 12):
            loss = model(x)
        loss.backward()
        del loss
        manager.synchronize()


def test_a_trace_has_the_bytes_in_each_tier(device: str, tmp_path: Path) -> None:
    with TieringManager(
        policy=LayerOrderPolicy(2), device=device, host_bytes="64MiB", spill_dir=tmp_path, trace=True
    ) as manager:
        trained(manager, device)
        manager.export_trace(tmp_path / "trace.json")
        stats = manager.stats()
    timeline = Timeline.read(tmp_path / "trace.json")
    assert len(timeline.steps) == 3
    assert set(timeline.levels) == ({"host", "disk"} if device == "cpu" else {"device", "host", "disk"})
    found = timeline.peak("host")
    assert found is not None
    assert found[1] == stats["host.used.peak"] > 0
    assert (timeline.budget, timeline.device) == (None, str(manager.device.torch_device))
    assert dict(timeline.summary)["offloaded"].startswith(f"{stats['offloaded.blocks.total']} blocks, ")
    assert timeline.report[0][0] == "no plan"


def test_device_memory_is_that_of_torch(device: str, device_module: Any, tmp_path: Path) -> None:
    """Without a manager's own copies: nothing moves, and all that is saved stays."""
    told: list[int] = []
    model, x = stack(LAYERS, device)
    with TieringManager(policy=LayerOrderPolicy(1), device=device, host_bytes="64MiB", trace=True) as manager:
        with manager.offload_context(model.layers, min_bytes=64 * MIB):
            for layer in model.layers:
                layer.register_forward_pre_hook(lambda *_: told.append(device_module.memory_allocated()))
            loss = model(x)
        loss.backward()
        manager.export_trace(tmp_path / "trace.json")
    timeline = Timeline.read(tmp_path / "trace.json")
    forwards = [span for span in timeline.spans["compute: layers"] if span.name.startswith("forward")]
    assert [timeline.level("device", span.began) for span in forwards] == told
    assert told == sorted(set(told))


def test_the_last_steps_are_drawn(device: str, tmp_path: Path) -> None:
    with TieringManager(policy=LayerOrderPolicy(2), device=device, host_bytes="64MiB", trace=True) as manager:
        trained(manager, device)
        for steps in (1, 2):
            manager.plot(tmp_path / f"{steps}.svg", steps=steps)
        manager.plot(tmp_path / "step.png")
    found = ["".join(ElementTree.parse(tmp_path / f"{steps}.svg").getroot().itertext()) for steps in (1, 2)]
    assert "step 3 of 3" in found[0]
    assert "steps 2 to 3 of 3" in found[1]
    assert "host, at most" in found[1]
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("device_module")
def test_a_budget_is_in_the_trace(device: str, tmp_path: Path) -> None:
    with TieringManager(device_budget="1GiB", device=device, host_bytes="64MiB", trace=True) as manager:
        trained(manager, device)
        manager.export_trace(tmp_path / "trace.json")
        report = manager.report()
    timeline = Timeline.read(tmp_path / "trace.json")
    assert timeline.budget == report.budget == 1 << 30
    assert list(timeline.advice) == list(report.advice)


def test_there_is_nothing_to_draw_without_a_trace(device: str, tmp_path: Path) -> None:
    with TieringManager(policy="layer-order", device=device, host_bytes="1MiB") as manager:
        with pytest.raises(RuntimeError, match="trace=True"):
            manager.plot(tmp_path / "step.png")
        assert not (tmp_path / "step.png").exists()


def test_what_cannot_be_drawn_is_refused_before_anything_is_waited_for(device: str, tmp_path: Path) -> None:
    with TieringManager(policy="layer-order", device=device, host_bytes="1MiB", trace=True) as manager:
        with pytest.raises(ValueError, match=r"ends in \.png or \.svg"):
            manager.plot(tmp_path / "step.pdf")
        with pytest.raises(ValueError, match="no layer was recorded"):
            manager.plot(tmp_path / "step.png")
