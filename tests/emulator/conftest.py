"""These tests are about the emulator itself; with a real device under test they are left out."""

import os

from ascend_emulator.hardware import real_cann

if os.environ.get("TIERED_MEM_TEST_DEVICE", "npu") != "npu" or real_cann() is not None:
    collect_ignore_glob = ["test_*.py"]
