"""The real torch_npu on a machine without an NPU, over an emulated CANN runtime."""

from ascend_emulator.drives import DriveOperation, ModelledDrive
from ascend_emulator.errors import EmulatorError
from ascend_emulator.faults import Fault, clear_faults, inject
from ascend_emulator.races import Access, Race, clear_races, host_access, races
from ascend_emulator.startup import configure, start
from ascend_emulator.timeline import Span, now, record_timeline, timeline, write_trace

__all__ = [
    "Access",
    "DriveOperation",
    "EmulatorError",
    "Fault",
    "ModelledDrive",
    "Race",
    "Span",
    "clear_faults",
    "clear_races",
    "configure",
    "host_access",
    "inject",
    "now",
    "races",
    "record_timeline",
    "start",
    "timeline",
    "write_trace",
]
