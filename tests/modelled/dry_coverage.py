"""Trains what the emulator's table of operators names, and tells all that happened on the device, dry or real."""

import gc
import json
from functools import partial

import torch

from emulator.coverage import ROWS
from tests.modelled.dry_training import record

if __name__ == "__main__":
    torch.npu.memory._record_memory_history(stacks="python", context=None)
    gc.disable()  # how often it comes by itself depends on how many objects Python has, and a dry run has others
    print(json.dumps({name: record(partial(train, "npu")) for name, train in ROWS.items()}))
