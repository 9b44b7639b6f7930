"""The real torch_npu on a machine without an NPU, over an emulated CANN runtime."""

from ascend_emulator.errors import EmulatorError
from ascend_emulator.startup import configure, start

__all__ = ["EmulatorError", "configure", "start"]
