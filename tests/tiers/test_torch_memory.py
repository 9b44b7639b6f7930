"""TorchPinnedMemory, on the device under test. The registrars are tested with RegisteredMemory."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.conftest import EMULATED
from tests.contracts import check_host_memory
from tiered_mem.allocators import Region
from tiered_mem.allocators.base import OutOfHostMemory
from tiered_mem.tiers.pinning import NpurtRegistrar, TorchPinnedMemory


@pytest.fixture(autouse=True)
def has_pinned_memory(device: str) -> None:
    if device == "cpu":
        pytest.skip("torch pins memory for a device only")


def is_pinned(region: Region) -> bool:
    whole = (ctypes.c_char * region.nbytes).from_address(region.ptr)
    return torch.frombuffer(whole, dtype=torch.uint8).is_pinned()


def test_contract() -> None:
    check_host_memory(TorchPinnedMemory)


def test_torch_knows_the_memory_as_pinned() -> None:
    memory = TorchPinnedMemory()
    region = memory.allocate(3 << 20)
    assert is_pinned(region)
    memory.deallocate(region)
    memory.close()


def test_a_region_takes_a_power_of_two() -> None:
    memory = TorchPinnedMemory()
    assert [memory.footprint(nbytes) for nbytes in (1, 4096, 4097, (1 << 30) + 1)] == [1, 4096, 8192, 2 << 30]


def test_what_is_given_back_is_torchs_for_its_next_tensor() -> None:
    memory = TorchPinnedMemory()
    region = memory.allocate(3 << 20)
    memory.deallocate(region)
    assert torch.empty(4 << 20, dtype=torch.uint8, pin_memory=True).data_ptr() == region.ptr


def test_a_failure_to_pin_is_told_and_not_repeated(device: str) -> None:
    if not EMULATED:
        pytest.skip("only the emulated runtime can be told to fail")
    import ascend_emulator

    memory = TorchPinnedMemory()
    held = memory.allocate(1 << 20)
    torch.npu.host_empty_cache()
    ascend_emulator.inject("aclrtMallocHost:1")
    try:
        with pytest.raises(OutOfHostMemory, match=r"could not pin 1.*ACL code 207001.*used 1\.0 MiB"):
            memory.allocate(1 << 20)
    finally:
        ascend_emulator.clear_faults()
    assert ctypes.CDLL("libascendcl.so").aclrtPeekAtLastError(0) == 0
    again = memory.allocate(1 << 20)
    assert is_pinned(again)
    memory.deallocate(again)
    memory.deallocate(held)


def test_a_torch_npu_without_its_runtime_is_told(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device != "npu":
        pytest.skip("torch_npu is not loaded")
    monkeypatch.delattr(torch.npu, "npurt", raising=False)
    with pytest.raises(RuntimeError, match=r"no npurt\(\).*AclRegistrar"):
        NpurtRegistrar()
