"""One of several processes that train a sharded model on the CPU: fsdp_worker.py JOBS RANK WORLD MEETING FOLDER.

MEETING is a file by which they find one another. Of each job of JOBS ("train+places") a file is left in FOLDER; one
in which anything is not as it should be ends with an error.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from tests.spill.declared_files import DeclaredFiles
from tiered_mem import TieringManager
from tiered_mem.optimizer.bucket import Absent
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer
from tiered_mem.spill.disk_tier import DiskTier

RESIDENCIES = ("disk", "host", "device-until-offload")
BUCKET_BYTES = 4096
STEPS = 3  # before the checkpoint, and again after it

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class Model(nn.Module):
    """Of two processes the second one has nothing of the parameters with one row, and less of those with three."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1, 128), 0.5))
        self.narrow = nn.Linear(128, 3)
        self.wide = nn.Linear(3, 128)
        self.norm = nn.LayerNorm(128)
        self.other = nn.Linear(128, 3)
        self.last = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.wide(self.narrow(x * self.scale).tanh()))
        return self.last(self.other(x).tanh())


class EachWhole(Optimizer):
    """Steps by the sign of the whole of each gradient, for which the processes have to meet.

    All first of one kind, and then all of another: the processes have to have the same parameters in each call.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norms = [param.grad.full_tensor().norm() for param in params]
        means = [self._mean(param, norm) for param, norm in zip(params, norms, strict=True)]
        sums = [mean.full_tensor().sum() for mean in means]
        for param, mean, total in zip(params, means, sums, strict=True):
            param.sub_(mean, alpha=float(self.param_groups[0]["lr"] * total.sign()))

    def _mean(self, param: Any, norm: torch.Tensor) -> Any:
        mean = self.state[param].setdefault("mean", torch.zeros_like(param))
        return mean.mul_(0.9).add_(param.grad, alpha=float(1 / norm))


class LocalNorm(Optimizer):
    """Scales by the norm of what this process has of all gradients: it needs all at once."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([param.grad.to_local().square().sum() for param in params]).sum().sqrt() + 1e-6
        for param in params:
            param.to_local().sub_(param.grad.to_local() / norm)


class Watched(torch.optim.AdamW):
    """Notes in which memory the states are while it steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2, amsgrad=True)
        self.seen: list[tuple[int, int]] = []

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                mean = self.state[param]["exp_avg"]
                expect(type(mean) is DTensor, f"a state is a {type(mean)} in the step")
                expect(mean.placements == param.placements, "a state is placed otherwise than its parameter")
                if mean.to_local().numel():
                    storage = mean.to_local().untyped_storage()
                    self.seen.append((storage.data_ptr(), storage.nbytes()))
        return result


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "adam, one by one": lambda params: torch.optim.Adam(params, lr=1e-2, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "muon": lambda params: torch.optim.Muon([param for param in params if param.ndim == 2 and len(param) > 1]),
    "each whole": EachWhole,
}


class Trainee:
    """A sharded model with an optimizer, which is tiered if there is a residency.

    dim: the dimension that is sharded of the parameters in which that is even.
    """

    def __init__(self, residency: str | None = None, optimizer: str = "adamw", dim: int = 0) -> None:
        torch.manual_seed(0)
        self.model = Model()

        def placement(param: nn.Parameter) -> Shard:
            # `other` is of the same shape as `narrow`, and not of the same shards.
            movable = param.ndim > dim and param.shape[dim] % 2 == 0 and param is not self.model.other.weight
            return Shard(dim if movable else 0)

        fully_shard(self.model.wide, shard_placement_fn=placement)
        fully_shard(self.model, shard_placement_fn=placement)
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.parameters()))
        self.manager: TieringManager | None = None
        self.offload = lambda: None
        if residency is not None:
            self.tier(residency)
        self.steps = 0

    def tier(self, residency: Any) -> None:
        folder = Path(tempfile.gettempdir())  # which the test has set
        disk = DiskTier(folder, capacity=64 << 20, files=DeclaredFiles()) if residency == "disk" else None
        self.manager = TieringManager(policy="lru", device="cpu", host_bytes="16MiB", disk=disk)
        tiered = self.manager.register_optimizer(
            self.optimizer, bucket_bytes=BUCKET_BYTES, residency=residency, separable=True
        )
        self.optimizer, self.offload = tiered, tiered.states.offload

    def train(self, steps: int = 1) -> Trainee:
        """Each process has batches of its own."""
        for _ in range(steps):
            generator = torch.Generator().manual_seed(100 * dist.get_rank() + self.steps)
            self.model(torch.randn(16, 128, generator=generator)).square().mean().backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
        return self

    def saved(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, folder: Path) -> Trainee:
        saved = self.saved()
        dcp.load(saved, checkpoint_id=folder)
        model, optimizer = saved["model"], saved["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.steps = STEPS
        return self

    def close(self) -> None:
        if self.manager is not None:
            self.manager.close()


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"rank {dist.get_rank()}: {what}")


def values(trainee: Trainee, *, whole: bool = False) -> dict[str, torch.Tensor]:
    """Parameters and states by name: what this process has of them, or all of it."""
    optimizer = trainee.saved()["optimizer"]
    found = dict(trainee.model.named_parameters())
    for name, state in optimizer["state"].items():
        found |= {f"{name}.{key}": value for key, value in state.items()}
    plain = {}
    for name, value in found.items():
        if isinstance(value, DTensor):
            value = value.full_tensor() if whole else value.to_local()
        plain[name] = value.detach().clone()
    return plain


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], what: str) -> None:
    expect(one.keys() == other.keys(), f"{what}: {one.keys()} and {other.keys()}")
    for name in one:
        expect(torch.equal(one[name], other[name]), f"{what}: {name} is {other[name]} and should be {one[name]}")


def buckets_are_alike(optimizer: Optimizer) -> list[int]:
    """The same parameters in all processes, though what these have of them has other sizes.

    Returns which layouts the buckets have.
    """
    if not isinstance(optimizer, TieredOptimizer):
        raise TypeError(optimizer)
    numbers = {param: number for number, param in enumerate(optimizer.param_groups[0]["params"])}
    mine = [[numbers[param] for param in bucket.params] for bucket in optimizer.states.pipeline.buckets]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    expect(all(each == mine for each in everybody), f"buckets of {everybody}")
    expect(len(mine) > 1, f"buckets of {mine}")
    return [id(bucket.fields) for bucket in optimizer.states.pipeline.buckets]


def train(folder: Path) -> None:
    """Two trainings side by side, step by step. A checkpoint of a tiered one is left, and what became of it."""
    for optimizer in OPTIMIZERS:
        for dim, residency in enumerate(RESIDENCIES):
            plain, tiered = Trainee(None, optimizer, dim % 2), Trainee(residency, optimizer, dim % 2)
            fields = buckets_are_alike(tiered.optimizer)
            for step in range(3):
                what = f"{optimizer}, {residency}, shards of dimension {dim % 2}, step {step}"
                same(values(plain.train()), values(tiered.train()), what)
                tiered.offload()
            expect(fields == buckets_are_alike(tiered.optimizer), f"{optimizer}: states are not as the trial said")
            tiered.close()
    trainee = Trainee("host")
    dcp.save(trainee.train(STEPS).saved(), checkpoint_id=folder / "checkpoint")
    trainee.train(STEPS)
    torch.save([values(trainee), values(trainee, whole=True)], folder / f"expected-{dist.get_rank()}.pt")
    trainee.close()


def places(folder: Path) -> None:
    """Where states are between steps, in steps, and in a state_dict."""
    trainee = Trainee()
    watched = trainee.optimizer = Watched(list(trainee.model.parameters()))
    trainee.tier("host")
    tiered: Any = trainee.optimizer
    trainee.train()
    watched.seen.clear()
    trainee.train()
    span = max(start + nbytes for start, nbytes in watched.seen) - min(start for start, _ in watched.seen)
    expect(span <= tiered.states.pipeline.window_bytes, f"states are not in the window: they span {span} bytes")
    # In rest nothing but an empty part of a state is where the step had it.
    rest = [
        value
        for bucket in tiered.states.pipeline.buckets
        for state in bucket.states.values()
        for value in state.values()
    ]
    left = [value for value in rest if isinstance(value, torch.Tensor) and local(value).numel()]
    expect(not left and any(isinstance(value, Absent) for value in rest), f"states that are not away: {left}")
    held = sum(
        part.nbytes
        for bucket in tiered.states.pipeline.buckets
        for f in bucket.fields.values()
        for p in f
        for part in p.parts
    )
    expect(
        held == sum(local(value).nbytes for value in values(trainee).values()) - weights(trainee), f"{held} bytes"
    )
    manager = trainee.manager
    expect(manager is not None and int(manager.stats()["host.used.current"]) >= held, "they are not on the host")
    state_dict = tiered.state_dict()
    for param, state in zip(trainee.model.parameters(), state_dict["state"].values(), strict=True):
        expect(type(state["step"]) is torch.Tensor, "a step counter is spread")
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            found, read = state[key], tiered.state[param][key]
            for value in (found, read):
                expect(type(value) is DTensor, f"{key} is a {type(value)}")
                expect(
                    (value.shape, value.placements, value.device_mesh)
                    == (param.shape, param.placements, param.device_mesh),
                    f"{key} is placed otherwise than its parameter",
                )
            expect(torch.equal(local(found), local(read)), f"{key} of state and of state_dict")
    trainee.close()


def refusals(folder: Path) -> None:
    """All processes refuse an optimizer that needs all parameters at once, though one alone could see it."""
    model = Trainee().model
    with TieringManager(policy="lru", device="cpu", host_bytes="16MiB") as manager:
        try:
            manager.register_optimizer(LocalNorm(model.parameters()), separable=True)
        except ValueError as error:
            expect("LocalNorm" in str(error), str(error))
        else:
            expect(False, "it was not refused")


def resume(folder: Path) -> None:
    """In other processes than those that saved: in each residency, and unwrapped."""
    mine, whole = torch.load(folder / f"expected-{dist.get_rank()}.pt")
    for residency in (None, *RESIDENCIES):
        trainee = Trainee(residency).load(folder / "checkpoint").train(STEPS)
        same(mine, values(trainee), f"resumed with {residency}")
        trainee.close()
    for residency in RESIDENCIES:
        trainee = Trainee(residency, dim=1).load(folder / "checkpoint").train(STEPS)
        same(whole, values(trainee, whole=True), f"resumed with {residency}, shards of dimension 1")
        trainee.close()


def resume_alone(folder: Path) -> None:
    """In fewer processes gradients are others: those of an unwrapped one that resumes there, too, are right."""
    expected = Trainee().load(folder / "checkpoint")
    at_checkpoint = values(expected, whole=True)
    after = values(expected.train(STEPS), whole=True)
    for residency in RESIDENCIES:
        for dim in (0, 1):
            trainee = Trainee(residency, dim=dim).load(folder / "checkpoint")
            same(at_checkpoint, values(trainee, whole=True), f"loaded with {residency}")
            same(after, values(trainee.train(STEPS), whole=True), f"resumed with {residency}")
            trainee.close()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def weights(trainee: Trainee) -> int:
    """The bytes that this process has of the parameters."""
    return sum(local(param).nbytes for param in trainee.model.parameters())


@contextmanager
def process_group(rank: int, world: int, meeting: Path) -> Iterator[None]:
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{meeting}")
    yield
    dist.destroy_process_group()


JOBS = {job.__name__: job for job in (train, places, refusals, resume, resume_alone)}


def main(jobs: str, rank: str, world: str, meeting: str, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    with process_group(int(rank), int(world), Path(meeting)):
        for job in jobs.split("+"):
            JOBS[job](Path(folder))
            (Path(folder) / f"{job} {rank} of {world}").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
