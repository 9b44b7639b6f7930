"""A rank of a job, in a process of the launcher's. `hccl_jobs` starts jobs, and reads what their ranks say."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import ascend_emulator
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@contextmanager
def rank_of_job(backend: str = "hccl") -> Iterator[dict[str, Any]]:
    """Takes part in the job. What is put into the dictionary is printed as a line of JSON, with the races found."""
    torch.npu.set_device(RANK)
    dist.init_process_group(backend)
    said: dict[str, Any] = {"rank": RANK}
    yield said
    torch.npu.synchronize()
    watched = os.environ["ASCEND_EMULATOR_RACES"] == "1"
    said["races"] = [str(race) for race in ascend_emulator.races()] if watched else []
    dist.destroy_process_group()
    print(json.dumps(said), flush=True)


def digest(tensors: Iterable[Tensor]) -> str:
    """Of the bytes that this rank has of them."""
    found = hashlib.sha256()
    for tensor in tensors:
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(part.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
