"""Where a manager's host memory comes from, how much it takes, and what it does where there is less."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
import torch

from emulator.tests.launch import EMULATOR, run, write_script
from tests.conftest import EMULATED, needs_npurt
from tests.models import is_empty, is_right_step
from tiered_mem import TieringManager
from tiered_mem.allocators import PageableMemory, SlabPool
from tiered_mem.device.device import Device
from tiered_mem.errors import PinningFailed
from tiered_mem.tiers.host_tier import Form, HostTier, flat_form

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
only_emulated = pytest.mark.skipif(not EMULATED, reason="only the emulated runtime can be told what to refuse")


@pytest.mark.parametrize(
    ("pin", "source"),
    [
        (True, "AclPinnedMemory"),
        ("try", "AclPinnedMemory"),
        ("acl", "AclPinnedMemory"),
        pytest.param("npurt", "RegisteredMemory", marks=needs_npurt),
        ("acl-register", "RegisteredMemory"),
        ("torch", "TorchPinnedMemory"),
    ],
)
@only_emulated
def test_sources_of_pinned_memory(pin: bool | str, source: str, device: str) -> None:
    with TieringManager(policy="layer-order", device=device, host_bytes="16MiB", pin=pin) as manager:
        assert is_right_step(manager, device)
        stats = manager.stats()
        assert stats["host.source"] == source
        assert stats["host.reserved.current"] == 16 * MIB
        assert int(stats["offloaded.blocks.total"]) > 0
        assert stats["blocking.copies.total"] == stats["blocking.bytes.total"] == 0


def test_a_slot_has_the_form_that_is_asked_for_whatever_was_there_before() -> None:
    square, flat = Form(1 << 16, torch.float32, (128, 128), (128, 1)), flat_form(1 << 16)
    tier = HostTier(SlabPool(PageableMemory(), slab_bytes=1 << 20), Device("cpu"))
    places = set()
    for form in (square, square, flat, square):
        slots = tier.reserve([form, flat])
        assert [slot.tensor.shape for slot in slots] == [form.shape, flat.shape]
        assert [slot.tensor.dtype for slot in slots] == [form.dtype, flat.dtype]
        places.add(tuple(slot.tensor.data_ptr() for slot in slots))
        for slot in slots:
            tier.release(slot, None)
    assert len(places) == 1
    tier.close()


@pytest.mark.parametrize(("pin", "source"), [(False, "PageableMemory"), ("locked", "LockedMemory")])
def test_copies_from_memory_that_is_not_pinned_are_counted(pin: bool | str, source: str, device: str) -> None:
    with TieringManager(policy="layer-order", device=device, host_bytes="4MiB", pin=pin) as manager:
        assert is_right_step(manager, device)
        stats = manager.stats()
        assert stats["host.source"] == source
        moved = {
            what: [int(stats[f"{name}.{what}.total"]) for name in ("offloaded", "reloaded")]
            for what in ("blocks", "bytes")
        }
        assert stats["blocking.copies.total"] == sum(moved["blocks"]) > 0
        assert stats["blocking.bytes.total"] == sum(moved["bytes"])
        assert "copies that blocked the host" in manager.memory_summary()


def test_a_source_that_is_not_known_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=r"pin='hope' is not known; say True, False, 'try', or one of acl, npurt,"):
        TieringManager(policy="layer-order", device=device, pin="hope")


def test_a_source_of_another_device_is_refused(device: str) -> None:
    other = "cudart" if device == "npu" else "acl"
    with pytest.raises(
        PinningFailed, match=rf"no pinned host memory for {device}:0: {other}: .*pin='try' or pin=False"
    ):
        TieringManager(policy="layer-order", device=device, host_bytes="4MiB", pin=other)


def test_memory_is_taken_at_construction_where_the_size_is_said(device: str) -> None:
    for arguments, reserved in (
        ({"host_bytes": "8MiB"}, 8 * MIB),
        ({"host_bytes": "8MiB", "preallocate": False}, 0),
        ({}, 0),
        ({"host_bytes": "auto"}, 0),
    ):
        with TieringManager(policy="layer-order", device=device, **arguments) as manager:
            assert manager.stats()["host.reserved.current"] == reserved
            calls = int(manager.stats()["host.source_calls.total"])
            assert is_right_step(manager, device)
            grown = int(manager.stats()["host.source_calls.total"]) > calls
            assert grown == (reserved == 0)


def test_managers_share_a_pool_that_outlives_them(device: str) -> None:
    source = PageableMemory()
    pool = SlabPool(source, capacity=8 * MIB)
    with TieringManager(policy="layer-order", device=device, host_pool=pool) as one:
        with TieringManager(policy="layer-order", device=device, host_pool=pool) as other:
            assert is_right_step(one, device)
            assert is_right_step(other, device)
        assert is_right_step(one, device)
        assert is_empty(one)
    assert pool.stats().used == 0
    with pytest.raises(RuntimeError, match=r"regions? of .* still allocated"):
        source.close()
    pool.close()
    source.close()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("end", ["closed", "forgotten"])
def test_managers_of_one_process_share_what_there_is(
    end: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one may take is not there for the next, and is there again when that one is no more."""
    monkeypatch.setenv("TIERED_MEM_HOST_LIMIT", "1TiB")

    def make(host_bytes: float | None) -> TieringManager:
        return TieringManager(policy="layer-order", device=device, host_bytes=host_bytes, preallocate=False)

    def capacity(manager: TieringManager) -> int:
        return int(manager.stats()["host.capacity"])

    managers = [make(0.9)]
    first = capacity(managers[0])
    managers.append(make(0.9))
    assert capacity(managers[1]) == pytest.approx(first / 10, rel=1e-6)
    with pytest.raises(ValueError, match=r"less .* GiB that other managers of this process may take"):
        TieringManager(policy="layer-order", device=device, host_bytes=first)
    if end == "closed":
        for each in managers:
            each.close()
    else:
        managers.clear()
    with make(0.9) as manager:
        assert capacity(manager) == first


@pytest.mark.parametrize("arguments", [{"host_bytes": "8MiB"}, {"pin": False}, {"preallocate": True}])
def test_a_pool_and_what_describes_one_exclude_each_other(arguments: dict[str, object], device: str) -> None:
    pool = SlabPool(PageableMemory())
    with pytest.raises(ValueError, match="host_pool comes in place of host_bytes, pin and preallocate"):
        TieringManager(policy="layer-order", device=device, host_pool=pool, **arguments)  # type: ignore[arg-type]


LESS = """
    import ascend_emulator, logging, torch
    from pathlib import Path
    from tests.models import is_right_step
    from tiered_mem import TieringManager
    from tiered_mem.errors import PinningFailed

    logging.basicConfig(format="%(levelname)s %(message)s", level="WARNING")

    def show(**arguments):
        try:
            with TieringManager(policy="layer-order", device="npu", host_bytes="96MiB", **arguments) as manager:
                right = is_right_step(manager, "npu")
                stats = manager.stats()
                blocking = stats["blocking.copies.total"]
                print(right, stats["host.source"], stats["host.reserved.current"] >> 20, blocking)
        except PinningFailed as error:
            print(str(error).replace(chr(10), " "))
    """


@pytest.mark.slow(why="a process imports torch")
@only_emulated
def test_where_nothing_can_be_pinned(tmp_path: Path) -> None:
    script = write_script(tmp_path, dedent(LESS) + "show()\nshow(pin='try')\nshow(pin=False)\n")
    result = run(*EMULATOR, "--host", "1MiB", script, cwd=tmp_path, pythonpath=ROOT)
    assert result.returncode == 0, result.stderr
    refused, unpinned, asked = result.stdout.splitlines()
    assert refused.startswith(
        "no pinned host memory for npu:0: acl: AclPinnedMemory did not give a slab of 2.0 MiB"
    )
    assert "pinned already 0.0 MiB of 1.0 MiB" in refused
    assert all(f"; {name}: " in refused for name in ("npurt", "acl-register", "torch"))
    assert unpinned.startswith("True PageableMemory 96 ")
    assert asked == unpinned
    assert result.stderr.count("WARNING host memory is not pinned, and the host waits at each copy") == 1
