"""A training by several ranks, and all that happened on each device: to be compared, dry and real.

Run by torch.distributed.run with a folder, in which each rank writes what it found as JSON.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import ascend_emulator
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from emulator.tests.allocations import allocations, trace
from emulator.tests.hccl_training import RANK, Wrap, fsdp2, train
from emulator.tests.llama import Llama


def ddp(model: nn.Module, device: str) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.02, init_sync=False, find_unused_parameters=True)


WAYS: dict[str, Wrap] = {"ddp": ddp, "fsdp2": fsdp2}


def record(wrap: Wrap) -> dict[str, Any]:
    gc.collect()  # what the last one left would be freed at some time in this one
    torch.npu.reset_peak_memory_stats()
    before = len(trace())
    with ascend_emulator.record_timeline() as spans:
        train(Llama, wrap, "npu")
        torch.npu.synchronize()
    return {
        "allocations": allocations(trace()[before:]),
        "peak": torch.npu.max_memory_allocated(),
        "timeline": spans,
        "now": ascend_emulator.now(),
    }


if __name__ == "__main__":
    torch.npu.set_device(RANK)
    gc.disable()
    dist.init_process_group("hccl")
    torch.npu.memory._record_memory_history(stacks="python", context=None)
    found = {way: record(wrap) for way, wrap in WAYS.items()}
    dist.destroy_process_group()
    Path(sys.argv[1], f"{RANK}.json").write_text(json.dumps(found))
