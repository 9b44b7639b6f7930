"""One rank of a pipeline of Llama 2 7B: `python -m benchmarks.pipelines.child SCHEDULE TOKENS STEPS FOLDER WAY...`.

Run by torch.distributed.run in dry runs on a modelled NPU. Writes a line of JSON for each way: the seconds and the
peaks of this rank's steps. The way "recorded" writes what this rank does in a step to a file of the folder, named
by the rank, and says what its link moves.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

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

from benchmarks.planned.observed import ObservingPolicy
from tiered_mem import TieringManager
from tiered_mem.device.device import Device
from tiered_mem.policies import LayerOrderPolicy, ManualPolicy
from tiered_mem.policies.actions import How
from tiered_mem.policies.planning.profile import Link
from tiered_mem.policies.planning.stitching import RecordedStep, Way
from tiered_mem.tiers.measure import measured_link
from tiered_mem.tiers.pinning import pinned_slab

from .rank_step import Act, RankStep, in_a_row

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama import SHAPES, VOCABULARY, Layer

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = "npu"
MICROBATCHES = 8
Place = tuple[int, int]  # a step as the manager counts them, and positions of it
LINK_BYTES = 2 << 30  # a copy of that many takes its latency 10,000 times

SCHEDULES: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "ZBV": ScheduleZBVZeroBubble,
}


SPLIT = "zero-bubble", "ZBV"  # of which no layer is computed again


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


class Taken(NamedTuple):
    """What a stage has done: an `Act`, in which of the manager's steps, and its first position there."""

    kind: str
    stage: int
    batch: int
    begin: float
    end: float
    step: int
    first: int


@dataclass
class Log:
    """What the rank's stages have done in this step. policy: counts the positions."""

    policy: ObservingPolicy | None = None
    _acts: list[tuple[str, int, int, list[tuple[Any, Place]]]] = field(default_factory=list)

    @contextmanager
    def act(self, kind: str, stage: int, batch: int) -> Iterator[None]:
        marks = [self._mark()]
        self._acts.append((kind, stage, batch, marks))
        yield
        marks.append(self._mark())

    @contextmanager
    def more(self) -> Iterator[None]:
        """What goes on belongs to the last."""
        yield
        self._acts[-1][-1].append(self._mark())

    def taken(self) -> list[Taken]:
        """Once the device has done it all."""
        acts, self._acts = self._acts, []
        first = acts[0][-1][0][0]
        found = []
        for kind, stage, batch, marks in acts:
            begin, end = (first.elapsed_time(marks[n][0]) / 1e3 for n in (0, -1))
            (before, positions), (step, _) = marks[0][1], marks[-1][1]
            found.append(Taken(kind, stage, batch, begin, end, step, positions if before == step else 0))
        return found

    def _mark(self) -> tuple[Any, Place]:
        event = torch.npu.Event(enable_timing=True)
        event.record()
        return event, (0, 0) if self.policy is None else self.policy.place


class Stage(PipelineStage):
    """Its forms are given, whatever comes of the ranks' vote on that: a dry run knows no numbers on the device."""

    log: Log

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.log.act("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        with self.log.act("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        with self.log.act("W", self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

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
    recompute: How | None = None

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
        layers = [layer for part in self.parts for layer in part.layers]
        self.manager.attach(self.parts, layers=layers, recompute=self.recompute)
        made = [
            Stage(part, number, stages, torch.device(DEVICE, RANK), *part.forms(self.tokens))
            for part, number in zip(self.parts, own, strict=True)
        ]
        self.log = Log()
        for each in made:
            each.log = self.log
        self.steps = kind(made[0] if several == 1 else made, MICROBATCHES, loss_fn=partial(_loss, self.log))
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


def _loss(log: Log, logits: Tensor, targets: Tensor) -> Tensor:
    with log.more():
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


def recorded(schedule: str, tokens: int) -> RankStep:
    """A step in which all that is saved stays, and where no backward is split the same with all layers computed
    again in each way."""
    acts, plain = observed(schedule, tokens, None)
    steps: dict[Way, RecordedStep] = {None: plain}
    if schedule not in SPLIT:
        hows: tuple[How, ...] = "cheap", "full"
        for how in hows:
            _, steps[how] = observed(schedule, tokens, how)
    return RankStep(acts, steps)


def observed(schedule: str, tokens: int, how: How | None) -> tuple[list[Act], RecordedStep]:
    """The second step: in the first one layers have their trials, and torch's memory comes."""
    policy = ObservingPolicy()
    torch.npu.synchronize()
    torch.npu.empty_cache()
    with TieringManager(device=DEVICE, policy=policy, host_bytes="400GiB", preallocate=False) as manager:
        pipeline = Pipeline(schedule, tokens, manager, how)
        pipeline.log.policy = policy
        taken = []
        for _ in range(3):
            pipeline.run()
            taken.append(pipeline.log.taken())
        return joined(taken[1], policy)


def joined(taken: Sequence[Taken], policy: ObservingPolicy) -> tuple[list[Act], RecordedStep]:
    """One step of all that a rank did. Where nothing is kept from one microbatch to the next, the manager counts
    each as a step of its own."""
    steps: dict[int, RecordedStep] = {}
    begins: dict[int, float] = {}  # when the first position of each comes: no act has one before it began
    for each in taken:
        if each.step not in steps:
            recording, seconds = policy.measured[each.step]
            profile, blocks = recording.profile(seconds)
            steps[each.step] = RecordedStep(recording.names, blocks, profile)
            begins[each.step] = 0.0
        at = steps[each.step].profile.clock[each.first]
        begins[each.step] = max(begins[each.step], each.begin - at)
    counts = [0, *accumulate(len(step.names) for step in steps.values())]
    firsts = dict(zip(steps, counts, strict=False))
    start = min(begins.values())
    acts = [
        Act(act.kind, act.stage, act.batch, act.begin - start, act.end - start, firsts[act.step] + act.first)
        for act in taken
    ]
    return acts, in_a_row([(begins[number] - start, step) for number, step in steps.items()])


def link() -> Link:
    with pinned_slab(Device(DEVICE), LINK_BYTES) as (_, on_host):
        return measured_link(Device(DEVICE), on_host)


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
    schedule, tokens, steps, folder, *ways = sys.argv[1:]
    logging.getLogger("tiered_mem").setLevel(logging.ERROR)
    torch.npu.set_device(RANK)
    dist.init_process_group("hccl")
    plain = None
    for way in ways:
        began = time.perf_counter()
        if way == "recorded":
            recorded(schedule, int(tokens)).write(Path(folder, f"{RANK}.json"))
            say({"rank": RANK, "way": way, **asdict(link())})
            continue
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
