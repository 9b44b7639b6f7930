from __future__ import annotations

import sys
import time
from types import ModuleType

import pytest
import torch

from tiered_mem.device.device import Device
from tiered_mem.errors import DeviceUnavailable


@pytest.mark.parametrize("name", ["tpu", "", "NPU", "npu:x", "npu:-1", "npu:", "npu:0:1", "cuda 0", "0"])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"known are npu, cuda, cpu, as in 'npu' or 'npu:1'$") as error:
        Device(name)
    assert str(error.value).startswith(f"unknown device {name!r}; ")


def test_npu_without_torch_npu_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(DeviceUnavailable, match=r"^device 'npu' needs torch_npu: pip install 'tiered_mem\[npu\]'$"):
        Device("npu")


def test_npu_with_a_torch_npu_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> ModuleType:
        raise ImportError(f"libascendcl.so: cannot open shared object file, loading {name}")

    monkeypatch.setattr("importlib.import_module", refuse)
    message = "^device 'npu' asked for, but torch_npu does not load: libascendcl.so: cannot open shared object file"
    with pytest.raises(DeviceUnavailable, match=message) as error:
        Device("npu")
    assert isinstance(error.value.__cause__, ImportError)


def test_a_kind_that_the_machine_lacks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (device, "cuda"):
        monkeypatch.setattr(getattr(torch, kind), "is_available", lambda: False)
        message = rf"^device '{kind}' asked for, but torch\.{kind}\.is_available\(\) is False$"
        with pytest.raises(DeviceUnavailable, match=message):
            Device(kind)


def test_an_index_that_the_machine_lacks(device: str) -> None:
    count = getattr(torch, device).device_count()
    message = rf"^device '{device}:{count}' asked for, but this machine has {count}$"
    with pytest.raises(DeviceUnavailable, match=message):
        Device(f"{device}:{count}")


def test_the_index_is_the_current_one_unless_told(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = getattr(torch, device)
    assert Device(device).torch_device == torch.device(device, module.current_device())
    assert Device(f"{device}:0").torch_device == torch.device(device, 0)
    assert Device(torch.device(device, 0)).torch_device == torch.device(device, 0)
    monkeypatch.setattr(module, "device_count", lambda: 3)
    monkeypatch.setattr(module, "current_device", lambda: 2)
    assert Device(device).torch_device == torch.device(device, 2)
    assert Device(f"{device}:1").torch_device == torch.device(device, 1)


def test_work_goes_to_the_stream_it_is_told(device: str) -> None:
    here = Device(device)
    before = here.current_stream().stream_id
    side = here.new_stream()
    assert side.stream_id != before
    assert here.new_stream().stream_id != side.stream_id
    with here.on(side):
        assert here.current_stream().stream_id == side.stream_id
    assert here.current_stream().stream_id == before


def test_events_tell_when_work_is_done(device: str) -> None:
    here = Device(device)
    event = here.current_stream().record_event()
    side = here.new_stream()
    side.wait_event(event)
    side.synchronize()
    assert event.query()
    event.synchronize()


@pytest.mark.parametrize("kind", ["device", "cpu"])
def test_timed_events_tell_the_time_between_them(device: str, kind: str) -> None:
    here = Device(device if kind == "device" else "cpu")
    stream = here.current_stream()
    began = time.perf_counter()
    first = here.timed_event(stream)
    first.synchronize()
    middle = here.timed_event(stream)
    last = here.timed_event(stream)
    last.synchronize()
    seconds = time.perf_counter() - began
    assert first.query()
    assert last.query()
    assert 0 <= here.elapsed(first, last) <= seconds
    assert here.elapsed(first, middle) + here.elapsed(middle, last) == pytest.approx(
        here.elapsed(first, last), abs=1e-6
    )


def test_timed_events_can_be_waited_for(device: str) -> None:
    here = Device(device)
    side = here.new_stream()
    event = here.timed_event(here.current_stream())
    side.wait_event(event)
    side.synchronize()
    assert event.query()


def test_it_owns_its_tensors_only(device: str) -> None:
    on_device = torch.empty(1, device=device)
    on_cpu = torch.empty(1)
    assert Device(device).owns(on_device)
    assert not Device(device).owns(on_cpu)
    assert Device("cpu").owns(on_cpu)
    assert not Device("cpu").owns(on_device)


def test_layouts_of_the_devices_own_are_told_apart(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.empty(4, 4, device=device)
    assert Device(device).plain_layout(tensor)
    if device == "npu":
        for number, plain in [(2, True), (0, True), (1, True), (30, True), (3, False), (29, False), (-1, False)]:
            monkeypatch.setattr("torch.ops.npu.get_npu_format.default._op", lambda tensor, number=number: number)
            assert Device(device).plain_layout(tensor) == plain


def test_cpu_does_everything_at_once() -> None:
    cpu = Device("cpu")
    assert (cpu.kind, cpu.torch_device) == ("cpu", torch.device("cpu"))
    stream = cpu.current_stream()
    assert cpu.new_stream().stream_id == stream.stream_id
    event = stream.record_event()
    stream.wait_event(event)
    assert event.query()
    event.synchronize()
    stream.synchronize()
    with cpu.on(stream):
        assert cpu.plain_layout(torch.ones(2))


def test_cpu_needs_no_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert Device("cpu").plain_layout(torch.ones(2))
