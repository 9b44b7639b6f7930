"""The device that the examples and the benchmarks run on."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

if find_spec("rich") is None:
    sys.exit("the package rich is missing, which draws tables: pip install 'tiered_mem[examples]'")
try:
    import torch
except RuntimeError as failed:  # a device's package that torch loads by itself, as torch_npu without CANN
    sys.exit(f"torch does not load: {failed.__cause__ or failed}; try python -m ascend_emulator {sys.argv[0]}")


def find_device(command: str) -> str:
    """The accelerator of this machine: "npu" or "cuda". Ends the process where there is none.

    command: what runs on the emulated NPU after `python -m ascend_emulator`, such as "examples/train_gpt.py".
    """
    for kind in ("npu", "cuda"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind
    sys.exit(f"no NPU and no CUDA GPU here; run it as python -m ascend_emulator {command}")


def accelerator(kind: str) -> Any:
    """torch's module of a device, such as `torch.npu`."""
    return getattr(torch, kind)


def emulated() -> str:
    """What to say after the device's name."""
    return ", emulated" if "ascend_emulator" in sys.modules else ""
