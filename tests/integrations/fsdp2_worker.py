"""One of several ranks that train by accelerate with FSDP2, on the emulated NPUs: fsdp2_worker.py FOLDER.

Prints a line of JSON: the losses and a digest of the weights of each way to train, and what mistakes are answered.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

warnings.simplefilter("ignore")  # accelerate's and torch_npu's

from accelerate import Accelerator, FullyShardedDataParallelPlugin  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard  # noqa: E402

from tests.models import Stack  # noqa: E402
from tiered_mem import TieringManager  # noqa: E402
from tiered_mem.policies import LayerOrderPolicy  # noqa: E402
from tiered_mem.policies.actions import How  # noqa: E402

HOWS: tuple[How, ...] = ("cheap", "full")
RANK = int(os.environ["RANK"])
STEPS = 3

When = Literal["plain", "before", "after"]


class Loop:
    """A training, the same each time. registered: before or after `prepare`, or not at all.

    recompute: how the layers are computed again.
    """

    def __init__(self, registered: When, recompute: How | None = None) -> None:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Layer"],
        )
        self.accelerator = Accelerator(fsdp_plugin=plugin)
        device = self.accelerator.device
        self.manager = TieringManager(policy=LayerOrderPolicy(), device=device, host_bytes="64MiB")
        torch.manual_seed(0)
        model: Any = Stack(4, 16)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        if registered == "before":
            optimizer = self.manager.register_optimizer(optimizer)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if registered == "after":
            self.optimizer.optimizer = self.manager.register_optimizer(self.optimizer.optimizer)
        if registered != "plain":
            self.manager.attach(self.model, min_bytes=1, recompute=recompute)

    def train(self, first: int = 0) -> Any:
        """The losses of some steps, and a digest of this rank's weights after them."""
        losses = []
        for number in range(first, first + STEPS):
            generator = torch.Generator().manual_seed(2 * number + RANK)
            loss = self.model(torch.randn(32, 16, generator=generator).to(self.accelerator.device))
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        digest = hashlib.sha256()
        for weight in self.model.parameters():
            digest.update(weight.to_local().detach().cpu().numpy().tobytes())
        return losses, digest.hexdigest()


def made_before_sharding(manager: TieringManager) -> None:
    """As somebody would who does not use accelerate, which puts the new parameters into the optimizer."""
    model = Stack(4, 16).to(manager.device.torch_device)
    optimizer = manager.register_optimizer(torch.optim.AdamW(model.parameters()))
    fully_shard(model)
    model(torch.randn(32, 16, device=manager.device.torch_device)).backward()
    optimizer.step()


def offloaded_by_torch(manager: TieringManager) -> None:
    """Torch's own offload of all that an optimizer has."""
    model = fully_shard(Stack(4, 16), offload_policy=CPUOffloadPolicy())
    manager.attach(model)
    manager.register_optimizer(torch.optim.AdamW(model.parameters()))


def answer(mistake: Callable[[TieringManager], None]) -> str:
    """What it raises."""
    with TieringManager(policy=LayerOrderPolicy(), device=f"npu:{RANK}", host_bytes="64MiB") as manager:
        try:
            mistake(manager)
        except ValueError as error:
            return str(error)
    return ""


def main(folder: Path) -> None:
    found: dict[str, Any] = {"rank": RANK}
    loops: dict[When, Loop] = {}
    for registered in ("plain", "before", "after"):
        loop = loops[registered] = Loop(registered)
        found[registered] = loop.train()
        loop.accelerator.save_state(str(folder / registered))
        found[f"{registered} goes on"] = loop.train(STEPS)
        found[f"{registered} moved"] = loop.manager.stats()["offloaded.blocks.total"]
    for how in HOWS:
        loop = Loop("after", how)
        found[how] = [loop.train(), loop.train(STEPS)]
        kinds = loop.manager._contexts._recomputer._kinds.values()
        found[f"{how} treated"] = [(kind.excluded, len(kind.equal)) for kind in kinds]
    for first, second in (("plain", "plain"), ("plain", "after"), ("after", "plain"), ("after", "after")):
        loop = Loop(second)  # type: ignore[arg-type]
        loop.accelerator.load_state(str(folder / first))
        found[f"{first} to {second}"] = loop.train(STEPS)
    found["made before"] = answer(made_before_sharding)
    found["cpu offload"] = answer(offloaded_by_torch)
    print(json.dumps(found), flush=True)


main(Path(sys.argv[1]))
