"""Models of several ranks whose steps are made in backward, over HCCL: hccl_overlap_worker.py WAY...

Run by torch.distributed.run. Each rank prints a line of JSON: what each way gave with and without an overlap, or
the error that it ended with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from emulator.tests.hccl_rank import RANK, RANKS, rank_of_job
from emulator.tests.hccl_training import Perceptrons, fsdp2, sharded, whole
from emulator.tests.llama import CONTEXT, VOCABULARY, Llama
from tiered_mem import TieringManager
from tiered_mem.errors import OverlapRefused
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer

STEPS = 4
MICRO_BATCHES = 3
BUCKET_BYTES = 16384  # of which there are several


class Training:
    """Of a model with an optimizer, which is stepped in backward, or plain. Each rank has data of its own."""

    def __init__(self, model: nn.Module, *, tiered: bool, alike: bool = False) -> None:
        self.model = model
        self.optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.manager: TieringManager | None = None
        self.freed = 0  # gradients that were used in backward
        self._random = torch.Generator().manual_seed(1 if alike else 1 + RANK)
        if tiered:
            self.tier()

    def tier(self) -> None:
        self.manager = TieringManager(policy="lru", device="npu", host_bytes="64MiB")
        self.optimizer = self.manager.register_optimizer(
            self.optimizer, bucket_bytes=BUCKET_BYTES, overlap="backward"
        )

    def backward(self) -> float:
        tokens = torch.randint(VOCABULARY, (2, CONTEXT + 1), generator=self._random).to("npu")
        loss = self.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        return loss.item()

    def step(self) -> None:
        if isinstance(self.optimizer, TieredOptimizer):
            stepping = self.optimizer.states.stepping.open
            self.freed += 0 if stepping is None else len(stepping.stepped)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def announce(self) -> None:
        if isinstance(self.optimizer, TieredOptimizer):
            self.optimizer.last_backward()

    def found(self) -> list[Any]:
        """Weights and moments, of which the sums of all ranks' parts show each bit that differs here."""
        states = self.optimizer.state_dict()["state"]
        keys = [(number, key) for number in sorted(states) for key in ("exp_avg", "exp_avg_sq")]
        tensors = [*self.model.parameters(), *(states[number][key] for number, key in keys)]
        return [whole(each, "npu").cpu().double().sum().item() for each in tensors]

    def close(self) -> None:
        if self.manager is not None:
            self.manager.close()


def once(training: Training) -> list[float]:
    return [training.backward()]


def announced(training: Training) -> list[float]:
    """Gradients of all micro-batches are reduced and added up, and the last ones are announced."""
    losses = [training.backward() for _ in range(MICRO_BATCHES - 1)]
    training.announce()
    return [*losses, training.backward()]


def at_last(training: Training) -> list[float]:
    """Gradients are reduced once for each step, so that nothing has to be announced."""
    model: Any = training.model
    losses = []
    for number in range(MICRO_BATCHES):
        model.set_requires_gradient_sync(number == MICRO_BATCHES - 1)
        losses.append(training.backward())
    return losses


def hsdp(model: nn.Module, device: str) -> FSDPModule:
    """Of two ranks, each with a whole model: gradients are added up after they have been scattered to nobody."""
    mesh = init_device_mesh(device, (RANKS, 1), mesh_dim_names=("replicate", "shard"))
    return sharded(model, device, mesh=mesh)


Wrap = Callable[[nn.Module, str], nn.Module]
Backwards = Callable[[Training], list[float]]

SHARDED: dict[str, tuple[Callable[[], nn.Module], Wrap, Backwards]] = {
    "fsdp2": (Llama, fsdp2, once),
    "announced": (Perceptrons, fsdp2, announced),
    "at last": (Perceptrons, fsdp2, at_last),
    "hsdp": (Perceptrons, hsdp, once),
}


def train(way: str, *, tiered: bool) -> dict[str, Any]:
    make, wrap, backwards = SHARDED[way]
    torch.manual_seed(0)
    training = Training(wrap(make().to("npu"), "npu"), tiered=tiered)
    losses = []
    for _ in range(STEPS):
        losses += backwards(training)
        training.step()
    found = training.found()
    training.close()
    return {
        "outcome": [losses, found],
        "freed": training.freed,
        "parameters": len(list(training.model.parameters())),
    }


def both(way: str) -> dict[str, Any]:
    return {"plain": train(way, tiered=False), "tiered": train(way, tiered=True)}


def _ddp(*, view: bool, alike: bool, later: bool) -> str:
    """What the first step says with DistributedDataParallel, whose sum over the ranks comes after the hooks.

    view: gradients are views of its buckets. alike: all ranks have the same data, and the sum changes no bit.
    later: gradients are there already, and stay where they are.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(Perceptrons().to("npu"), bucket_cap_mb=0.02, gradient_as_bucket_view=view)
    training = Training(model, tiered=False, alike=alike)
    if later:
        for _ in range(2):
            training.backward()
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=False)
    training.tier()
    with closing(training), refusal() as said:
        training.backward()
        training.optimizer.step()
    return said[0]


def clipped(norm: float) -> str:
    """What one of the first two steps says where gradients of FSDP2 are clipped."""
    torch.manual_seed(0)
    training = Training(fsdp2(Perceptrons().to("npu"), "npu"), tiered=True)
    with closing(training), refusal() as said:
        for _ in range(2):
            training.backward()
            nn.utils.clip_grad_norm_(training.model.parameters(), norm)
            training.step()
    return said[0]


@contextmanager
def closing(training: Training) -> Iterator[None]:
    try:
        yield
    finally:
        training.close()


@contextmanager
def refusal() -> Iterator[list[str]]:
    """Notes what was refused, or that nothing was."""
    said = ["nothing was refused"]
    try:
        yield said
    except OverlapRefused as error:
        said[0] = str(error)


REFUSED: dict[str, Callable[[], str]] = {
    "clipped": partial(clipped, 1e-3),
    "clipped, which changes nothing": partial(clipped, 1e9),
    **{
        f"ddp, {view=}, {alike=}, {later=}": partial(_ddp, view=view, alike=alike, later=later)
        for view in (False, True)
        for alike in (False, True)
        for later in (False, True)
    },
}


if __name__ == "__main__":
    with rank_of_job() as said:
        for way in sys.argv[1:]:
            said[way] = both(way) if way in SHARDED else REFUSED[way]()
