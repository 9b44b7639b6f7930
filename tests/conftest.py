"""The tests run on the emulated NPU, on a real one where there is one, or on what TIERED_MEM_TEST_DEVICE names."""

import gc
import os
from collections.abc import Iterator
from typing import Protocol

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


class Link(Protocol):
    """Sets the bandwidth of the emulated host link, in both directions or in one: link("100MB/s", h2d="1GB/s")."""

    def __call__(self, rate: str = "0", *, h2d: str | None = None, d2h: str | None = None) -> None: ...


@pytest.fixture
def link() -> Iterator[Link]:
    """A link whose speed the test can set. Afterwards it has no limit, as before."""
    if not EMULATED:
        pytest.skip("only the emulated device has a link whose speed can be set")

    def set_rate(rate: str = "0", *, h2d: str | None = None, d2h: str | None = None) -> None:
        ascend_emulator.configure(h2d_bytes_per_s=h2d or rate, d2h_bytes_per_s=d2h or rate)

    yield set_rate
    getattr(torch, KIND).synchronize()
    set_rate()


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Whatever is freed is freed by reference counts alone: a cycle would show as a leak."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
