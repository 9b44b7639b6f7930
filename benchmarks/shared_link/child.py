"""One rank, by torchrun: `-m benchmarks.shared_link.child WAY STEPS LAYERS TOKENS BUDGET HOST_MEMORY`.

budget: bytes of the device. host_memory: the rate of the modelled host's, in bytes a second. The first rank writes
a line of JSON with what it measured: all of them do the same.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ascend_emulator
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.peak import Peak
from tiered_mem import TieringManager
from tiered_mem.policies import PlannedPolicy
from tiered_mem.policies.actions import Advice
from tiered_mem.policies.base import Event, StepMeasured
from tiered_mem.policies.planning import Link

from .links import MEASURED, PLAIN, SHARE, alone, shared

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama import SHAPES, Llama

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Told(PlannedPolicy):
    """Plans for the link that it was told, whatever steps show of that."""

    def decide(self, event: Event) -> Sequence[Advice]:
        if isinstance(event, StepMeasured):
            event = replace(event, out=0.0, back=0.0, both=0.0)
        return super().decide(event)


class Step:
    """A step of Llama 2 in bfloat16, sharded by FSDP2, with AdamW on the device."""

    def __init__(self, layers: int, tokens: int) -> None:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("npu"):  # made there, a dry run's weights take no memory here
            self.model = Llama(replace(SHAPES["7b"], layers=layers), tokens)
        torch.set_default_dtype(torch.float32)
        mesh = init_device_mesh("npu", (RANKS,))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self._tokens = torch.zeros((1, tokens), dtype=torch.int64).to("npu")
        self._optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)

    def run(self) -> tuple[float, int]:
        """The modelled seconds, and the most bytes of device memory."""
        torch.npu.current_stream().synchronize()
        peak = Peak(torch.npu)
        began = ascend_emulator.now()
        self.model(self._tokens, self._tokens).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch.npu.current_stream().synchronize()
        return ascend_emulator.now() - began, peak.read()


def main() -> None:
    way = sys.argv[1]
    steps, layers, tokens, budget, memory = map(int, sys.argv[2:])
    gc.disable()  # what it would free, and so the peaks, would depend on the number of Python's objects
    logging.getLogger("tiered_mem").setLevel(logging.ERROR)
    torch.npu.set_device(RANK)
    dist.init_process_group("hccl")
    step = Step(layers, tokens)
    found: dict[str, Any] = {"seconds": [], "peaks": [], "links": [], "report": ""}
    manager = manager_for(way, budget, memory)
    if manager is not None:
        manager.attach(step.model)
    for _ in range(steps):
        seconds, peak = step.run()
        gc.collect()
        found["seconds"].append(seconds)
        found["peaks"].append(peak)
        if manager is not None:
            assert isinstance(manager._policy, PlannedPolicy)
            found["links"].append(asdict(manager._policy._repertoire.link))
    if manager is not None:
        found["report"] = str(manager.report())
        manager.close()
    torch.npu.synchronize()
    dist.destroy_process_group()
    if RANK == 0:
        print(json.dumps(found), flush=True)


def manager_for(way: str, budget: int, memory: float) -> TieringManager | None:
    """One as a user makes it, which measures; one that was told of the link; or none."""
    if way == PLAIN:
        return None
    if way == MEASURED:
        return TieringManager(device_budget=budget)
    link = Link(**(shared(RANKS, memory) if way == SHARE else alone()))
    return TieringManager(policy=Told(budget, link, margin=min(4 << 20, budget // 16)))


if __name__ == "__main__":
    main()
