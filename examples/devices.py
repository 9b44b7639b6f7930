"""The device that the examples and the benchmarks run on."""

from __future__ import annotations

import sys

import torch


def find_device(command: str) -> str:
    """The accelerator of this machine: "npu" or "cuda". Ends the process where there is none.

    command: what runs on the emulated NPU after `python -m ascend_emulator`, such as "examples/train_gpt.py".
    """
    for kind in ("npu", "cuda"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind
    sys.exit(f"no NPU and no CUDA GPU here; run it as python -m ascend_emulator {command}")


def emulated() -> str:
    """What to say after the device's name."""
    return ", emulated" if "ascend_emulator" in sys.modules else ""
