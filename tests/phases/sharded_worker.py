"""Models of several ranks that leave between steps, over HCCL: sharded_worker.py CYCLES WAY...

Run by torch.distributed.run. Each rank prints a line of JSON: what each way gave with phases and without, and what
the device and the host had in each cycle.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from emulator.tests.hccl_rank import RANK, RANKS, digest, rank_of_job
from emulator.tests.hccl_training import ddp, hsdp, sharded
from tiered_mem import Offloaded, TieringManager

VOCABULARY, WIDTH = 61, 32
INNER = 90  # neither is a multiple of 4


class Tied(nn.Module):
    """Perceptrons of sizes that no four ranks share evenly, with a tied weight, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
            for _ in range(3)
        )
        self.blocks[1][1].requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens[:, :-1])
        x = x * self.scale.to(x.dtype)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


def tensor_parallel(model: Tied) -> nn.Module:
    # Between the two it stays a DTensor, as what is shared unevenly has to.
    plan = {"1": ColwiseParallel(use_local_output=False), "3": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, init_device_mesh("npu", (RANKS,)), plan)
    return model


WRAPS: dict[str, Callable[[Tied], nn.Module]] = {
    "fsdp2": partial(sharded, device="npu"),
    "kept": partial(sharded, device="npu", reshard_after_forward=False),
    "over two": partial(sharded, device="npu", reshard_after_forward=2),
    "bf16": partial(sharded, device="npu", mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "hsdp": partial(hsdp, device="npu"),
    "tensor parallel": tensor_parallel,
    "ddp": partial(ddp, device="npu"),
    "ddp, views": partial(DistributedDataParallel, bucket_cap_mb=0.02, gradient_as_bucket_view=True),
}


class Training:
    """Of a model whose ranks have data of their own; of a tensor-parallel one they have the same."""

    def __init__(self, way: str, cycles: int, residency: str | None) -> None:
        torch.manual_seed(0)
        self.model = WRAPS[way](Tied().to("npu"))
        # Only then may an optimizer have DTensors and others.
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=way != "tensor parallel")
        self.manager = TieringManager(policy="lru", device="npu", host_bytes="64MiB")
        if residency is not None:
            self.optimizer = self.manager.register_optimizer(self.optimizer, residency=residency)
        self.losses = torch.zeros(2 * cycles, device="npu")
        self._forwards = 0
        self._random = torch.Generator().manual_seed(1 if way == "tensor parallel" else 1 + RANK)

    def forward(self) -> torch.Tensor:
        tokens = torch.randint(VOCABULARY, (2, 17), generator=self._random).to("npu")
        loss: torch.Tensor = self.model(tokens)
        self.losses[self._forwards] = loss.detach()
        self._forwards += 1
        return loss

    def generate(self) -> None:
        with torch.no_grad():
            self.forward()

    def outcome(self) -> list[Any]:
        """The losses, and digests of this rank's weights and states."""
        # The model itself has what FSDP2 gathered last, or not.
        weights = _tensors((self.optimizer.param_groups, list(self.model.buffers())))
        states = _tensors(self.optimizer.state_dict()["state"])
        return [self.losses.tolist(), digest(weights), digest(states)]


def train(way: str, cycles: int) -> list[Any]:
    training = Training(way, cycles, None)
    for _ in range(cycles):
        training.forward().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.generate()
    return training.outcome()


def train_in_phases(way: str, cycles: int, residency: str) -> dict[str, Any]:
    """The same, with the model and the optimizer away whenever they may be."""
    training = Training(way, cycles, residency)
    manager, model, optimizer = training.manager, training.model, training.optimizer
    shards = sum(size for _, size in _shards(model))
    levels, falls, refusals = [], [], 0
    for _ in range(cycles):
        training.forward().backward()
        with manager.away(model, gradients=way != "ddp, views"):
            pass
        optimizer.step()
        optimizer.zero_grad()
        with manager.away(model, optimizer):
            nothing_here = _allocated()
            tokens = torch.zeros(2, 17, dtype=torch.long, device="npu")
            try:
                model(tokens)
            except Offloaded:
                refusals += 1
            del tokens
        training.generate()
        before = _allocated()
        manager.offload(model)
        falls.append(before - (model_away := _allocated()))
        manager.reload(model)
        levels.append([nothing_here, model_away, _allocated(), manager.stats()["host.used.current"]])
    outcome = training.outcome()
    manager.close()
    return {"outcome": outcome, "shards": shards, "falls": falls, "levels": levels, "refusals": refusals}


def _allocated() -> int:
    torch.npu.synchronize()
    allocated: int = torch.npu.memory_allocated()
    return allocated


def _shards(model: nn.Module) -> Iterator[tuple[int, int]]:
    """The memory of this rank's parts, each once: its place and its bytes."""
    parts = (
        part.to_local() if isinstance(part, DTensor) else part
        for part in (tensor.detach() for tensor in (*model.parameters(), *model.buffers()))
    )
    yield from {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.items()


def _tensors(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, (dict, list, tuple)):
        for each in thing.values() if isinstance(thing, dict) else thing:
            yield from _tensors(each)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    cycles = int(sys.argv[1])
    with rank_of_job() as said:
        for number, way in enumerate(sys.argv[2:]):
            residency = ("device-until-offload", "host")[number % 2]
            plain = train(way, cycles)
            gc.collect()  # FSDP2's cycles, which would be collected in the middle
            said[way] = train_in_phases(way, cycles, residency) | {"plain": plain}
            gc.collect()
