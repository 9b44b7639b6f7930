"""The real torch_npu on a machine without an NPU, over an emulated CANN runtime."""

from ascend_emulator.errors import EmulatorError
from ascend_emulator.races import Access, Race, clear_races, host_access, races
from ascend_emulator.startup import configure, start

__all__ = ["Access", "EmulatorError", "Race", "clear_races", "configure", "host_access", "races", "start"]
