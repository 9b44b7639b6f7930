"""The device that the tests run on: the emulated NPU, unless TIERED_MEM_TEST_DEVICE says "cuda" or a real NPU is here."""

import gc
import os
from collections.abc import Callable, Iterator

import ascend_emulator
import pytest
from ascend_emulator.hardware import real_cann

KIND = os.environ.get("TIERED_MEM_TEST_DEVICE", "npu")
EMULATED = KIND == "npu" and real_cann() is None

if EMULATED:
    ascend_emulator.start(hbm_bytes="4GiB")
elif KIND != "npu":
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch  # noqa: E402  the emulated device must be there first


@pytest.fixture
def device() -> str:
    """The kind of device under test."""
    return KIND


@pytest.fixture
def device_module() -> object:
    """torch.npu or torch.cuda."""
    return getattr(torch, KIND)


@pytest.fixture
def link() -> Iterator[Callable[[str], None]]:
    """Sets the bandwidth of both directions of the emulated host link, such as link("100MB/s"), for this test."""
    if not EMULATED:
        pytest.skip("only the emulated device has a link whose speed can be set")

    def set_rate(rate: str) -> None:
        ascend_emulator.configure(h2d_bytes_per_s=rate, d2h_bytes_per_s=rate)

    yield set_rate
    getattr(torch, KIND).synchronize()
    ascend_emulator.configure(h2d_bytes_per_s=0, d2h_bytes_per_s=0)


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Whatever is freed is freed by reference counts alone: a cycle would show as a leak."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
