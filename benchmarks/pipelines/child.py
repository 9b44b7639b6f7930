"""One rank of a pipeline of Llama 2 7B: `python -m benchmarks.pipelines.child SCHEDULE TOKENS STEPS WAY...`.

Run by torch.distributed.run in dry runs on a modelled NPU. Writes a line of JSON for each way: the seconds and the
peaks of this rank's steps.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ascend_emulator
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.stage import InferenceMode

from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy, ManualPolicy

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama import SHAPES, VOCABULARY, Layer

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = "npu"
MICROBATCHES = 8

SCHEDULES: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "ZBV": ScheduleZBVZeroBubble,
}


class Part(nn.Module):
    """The layers of one stage, and at the ends the embedding and the head."""

    def __init__(self, number: int, stages: int, tokens: int) -> None:
        super().__init__()
        shape = SHAPES["7b"]
        self.first, self.last = number == 0, number == stages - 1
        self.tokens = nn.Embedding(VOCABULARY, shape.width) if self.first else None
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers // stages))
        self.norm = nn.RMSNorm(shape.width) if self.last else None
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False) if self.last else None
        turn = torch.zeros(tokens, shape.width // shape.heads)
        self.register_buffer("cosines", turn, persistent=False)
        self.register_buffer("sines", turn.clone(), persistent=False)

    def forms(self, tokens: int) -> tuple[Tensor, Tensor]:
        """What goes in and comes out: in a dry run ranks cannot tell each other."""
        numbers = torch.empty((1, tokens), dtype=torch.int64, device="meta")
        between, logits = (
            torch.empty((1, tokens, width), dtype=torch.bfloat16, device="meta", requires_grad=True)
            for width in (SHAPES["7b"].width, VOCABULARY)
        )
        return numbers if self.first else between, logits if self.last else between

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x)
        for layer in self.layers:
            x = layer(x, (self.cosines, self.sines))
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


class Stage(PipelineStage):
    """Its forms are given, whatever comes of the ranks' vote on that: a dry run knows no numbers on the device."""

    @property
    def _inference_mode(self) -> InferenceMode:
        return InferenceMode.STATIC

    @_inference_mode.setter
    def _inference_mode(self, voted: InferenceMode | None) -> None:
        """Needs not be known."""


@dataclass
class Pipeline:
    """This rank's stages of one schedule, with an optimizer."""

    schedule: str
    tokens: int
    manager: TieringManager

    def __post_init__(self) -> None:
        kind = SCHEDULES[self.schedule]
        several = 2 if issubclass(kind, PipelineScheduleMulti) else 1
        stages = RANKS * several
        own = [RANK + RANKS * number for number in range(several)]
        if self.schedule == "ZBV":
            own = [RANK, stages - 1 - RANK]  # down the ranks, and up again
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(DEVICE):
            self.parts = nn.ModuleList(Part(number, stages, self.tokens) for number in own)
        torch.set_default_dtype(torch.float32)
        self.manager.attach(self.parts, layers=[layer for part in self.parts for layer in part.layers])
        made = [
            Stage(part, number, stages, torch.device(DEVICE, RANK), *part.forms(self.tokens))
            for part, number in zip(self.parts, own, strict=True)
        ]
        self.steps = kind(made[0] if several == 1 else made, MICROBATCHES, loss_fn=_loss)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.parts.parameters(), foreach=False)
        self.optimizer = self.manager.register_optimizer(self.optimizer)
        self._batch = torch.zeros((MICROBATCHES, self.tokens), dtype=torch.int64).to(DEVICE)
        self._first, self._last = 0 in own, stages - 1 in own

    def run(self) -> float:
        """The seconds of forward and backward of all microbatches."""
        torch.npu.synchronize()
        dist.barrier()
        torch.npu.synchronize()
        began = ascend_emulator.now()
        self.steps.step(
            *((self._batch,) if self._first else ()),
            target=self._batch if self._last else None,
            return_outputs=False,
        )
        torch.npu.current_stream().synchronize()
        took = ascend_emulator.now() - began
        self.optimizer.step()
        self.optimizer.zero_grad()
        return took


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@dataclass
class Plain:
    """Of a rank. standing: parameters and gradients. peak: with all that is saved."""

    standing: int
    peak: int

    def budget(self, share: float) -> int:
        return int(self.standing + share * (self.peak - self.standing))


def measured(schedule: str, tokens: int, steps: int, way: str, plain: Plain | None) -> dict[str, Any]:
    torch.npu.synchronize()
    torch.npu.empty_cache()
    budget = 0
    if way.startswith(("auto", "moving")) and plain is not None:
        budget = plain.budget(int(way.split()[1]) / 100)
    with _manager(way, budget) as manager:
        pipeline = Pipeline(schedule, tokens, manager)
        seconds, peaks = [], []
        for _ in range(steps if budget else 3):
            torch.npu.reset_peak_memory_stats()
            seconds.append(pipeline.run())
            peaks.append(torch.npu.max_memory_allocated())
        standing = 2 * sum(each.nbytes for each in pipeline.parts.parameters())
        found: dict[str, Any] = {"way": way, "budget": budget, "standing": standing}
        found |= {"seconds": seconds, "peaks": peaks, "report": str(manager.report())}
        return found | {"moved": manager.stats()["offloaded.bytes.total"]}


def _manager(way: str, budget: int) -> TieringManager:
    kind, _, much = way.partition(" ")
    policy: Any = "auto"
    if kind == "plain":
        policy = ManualPolicy()
    elif kind == "layers":
        policy = LayerOrderPolicy(offload=int(much))
    return TieringManager(
        device=DEVICE,
        policy=policy,
        device_budget=budget or None,
        host_bytes="400GiB",
        preallocate=False,
        recompute="auto" if kind == "auto" else False,
    )


def main() -> int:
    schedule, tokens, steps, *ways = sys.argv[1:]
    logging.getLogger("tiered_mem").setLevel(logging.ERROR)
    torch.npu.set_device(RANK)
    dist.init_process_group("hccl")
    plain = None
    for way in ways:
        began = time.perf_counter()
        try:
            found = measured(schedule, int(tokens), int(steps), way, plain)
        except Exception as error:
            say({"rank": RANK, "way": way, "error": str(error.__cause__ or error)})
            return 0
        if way == "plain":
            plain = Plain(found["standing"], max(found["peaks"]))
        say({"rank": RANK, "real": time.perf_counter() - began, **found})
    dist.destroy_process_group()
    return 0


def say(found: dict[str, Any]) -> None:
    """A line and its end in one piece: those of two ranks come through one pipe."""
    print(json.dumps(found) + "\n", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
