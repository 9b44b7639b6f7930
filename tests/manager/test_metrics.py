"""A manager's numbers, where others look at them."""

from __future__ import annotations

import gc
import re
import sys
import urllib.error
import urllib.request

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import MakeManager
from tests.models import stack
from tiered_mem import TieringManager
from tiered_mem.metrics import MetricsServer, export

pytestmark = pytest.mark.once(why="what is counted is the same in each schedule")


def train(manager: TieringManager, device: str) -> None:
    """One step, in which two layers leave."""
    model, x = stack(3, device)
    with manager.offload_context(model.layers, min_bytes=1):
        loss = model(x).sum()
    loss.backward()
    manager.synchronize()


def page(server: MetricsServer) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
    return text


def test_prometheus_gets_each_number_of_the_stats(make_manager: MakeManager, device: str) -> None:
    manager = make_manager(2)
    train(manager, device)
    stats = manager.stats()
    with export(manager, 0) as server:
        families = {family.name: family for family in text_string_to_metric_families(page(server))}
    told = {
        sample.name.removesuffix("_total"): sample.value
        for family in families.values()
        for sample in family.samples
        if family.type in ("counter", "gauge") and sample.labels == {"device": str(manager.device.torch_device)}
    }
    numbers = {name: value for name, value in stats.items() if not isinstance(value, str)}
    assert numbers["offloaded.bytes.total"]
    assert told == {
        f"tiered_mem_{name.removesuffix('.total').replace('.', '_')}": value for name, value in numbers.items()
    }
    assert families["tiered_mem_offloaded_bytes"].type == "counter"
    assert families["tiered_mem_host_used_peak"].type == "gauge"
    (words,) = families["tiered_mem_info"].samples
    assert words.labels["host_source"] == stats["host.source"]


def test_the_numbers_are_those_of_the_moment(make_manager: MakeManager, device: str) -> None:
    manager = make_manager(2)
    moved = re.compile(r"^tiered_mem_offloaded_blocks_total.* (\S+)$", re.MULTILINE)
    with export(manager, 0) as server:
        before = moved.findall(page(server))
        train(manager, device)
        assert before == ["0.0"]
        assert float(*moved.findall(page(server))) == manager.stats()["offloaded.blocks.total"] > 0


def test_the_port_is_free_again_after_close(make_manager: MakeManager) -> None:
    manager = make_manager()
    server = export(manager, 0)
    with pytest.raises(OSError, match="Address already in use"):
        export(manager, server.port)
    server.close()
    server.close()
    with pytest.raises(urllib.error.URLError):
        page(server)
    export(manager, server.port).close()


def test_a_manager_is_not_kept_alive(device: str) -> None:
    manager = TieringManager(policy="layer-order", device=device, host_bytes="16MiB")
    with export(manager, 0) as server:
        assert "tiered_mem_host_capacity" in page(server)
        manager.close()
        del manager
        gc.collect()
        assert page(server) == ""


def test_a_missing_package_is_named(make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install 'tiered_mem\[metrics\]'"):
        export(make_manager(), 0)


class Writer:
    """A writer that keeps what it gets."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int | None], float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        self.kept[tag, global_step] = scalar_value


def test_a_writer_gets_each_number_once(make_manager: MakeManager, device: str) -> None:
    manager, writer = make_manager(2), Writer()
    train(manager, device)
    manager.log_to(writer, 7)
    numbers = {name: value for name, value in manager.stats().items() if not isinstance(value, str)}
    assert writer.kept == {(f"tiered_mem/{name}", 7): value for name, value in numbers.items()}


def test_the_profiler_of_torch_sees_copies_by_name(make_manager: MakeManager, device: str) -> None:
    manager = make_manager(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train(manager, device)
    counted = {event.key: event.count for event in profiler.key_averages() if event.key.startswith("tiered_mem: ")}
    assert manager.stats()["offloaded.blocks.total"]
    assert set(counted) == {"tiered_mem: offload", "tiered_mem: reload"}
