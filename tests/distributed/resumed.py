"""A training that goes on from its last checkpoint: resumed.py FOLDER [--steps N] [--plain] [--deaths N]

Run by torch.distributed.run, which begins it again after each of its ends. It trains a Llama under FSDP2, whose
activations and optimizer states are on the host and on disk. Each step is saved by torch.distributed.checkpoint,
which writes while the next step runs. In the end each rank prints a line of JSON with a digest of its weights and
states.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from emulator.tests.hccl_rank import RANK, RANKS, digest, rank_of_job
from emulator.tests.llama import VOCABULARY
from tests.distributed.contest import DEVICE, Found
from tests.distributed.models import LAYERS, fsdp2, llama
from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy

BATCH, TOKENS = 2, 64
# Where a rank dies that is to: each time at another of these, and in another step.
PLACES = ("forward", "backward", "step", "save")


class Training:
    """The model, its optimizer, and what is known of the steps before."""

    def __init__(self, folder: Path, *, plain: bool) -> None:
        self._folder = folder
        model = llama()
        layers = nn.ModuleList(model.blocks)
        self._model = fsdp2(model)
        self._optimizer: Any = torch.optim.AdamW(self._model.parameters(), lr=1e-2)
        self._offload: Any = nullcontext()
        if not plain:
            spill = folder / "spill"
            spill.mkdir(parents=True, exist_ok=True)
            manager = TieringManager(
                device=DEVICE, policy=LayerOrderPolicy(offload=LAYERS), host_bytes="16MiB", spill_dir=spill
            )
            self._offload = manager.offload_context(layers, min_bytes=4096)
            self._optimizer = manager.register_optimizer(self._optimizer, residency="disk", bucket_bytes="64KiB")
            self.close = manager.close

    def close(self) -> None:
        """Leaves nothing behind."""

    def resume(self) -> int:
        """Loads the last step that was saved as a whole. Returns the number of the next one."""
        saved = [int(path.parent.name) for path in self._folder.glob("checkpoints/*/.metadata")]
        if not saved:
            return 0
        model, optimizer = get_state_dict(self._model, self._optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=self._checkpoint(max(saved)))
        set_state_dict(self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)
        return max(saved) + 1

    def step(self, number: int) -> Iterator[str]:
        """Makes a step and begins to save it. Says where it is on the way."""
        generator = torch.Generator().manual_seed(RANKS * number + RANK)
        tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=generator).to(DEVICE)
        with self._offload:
            loss = self._model(tokens[:, :-1], tokens[:, 1:])
        yield "forward"
        loss.backward()
        yield "backward"
        self._optimizer.step()
        self._optimizer.zero_grad()
        yield "step"

    def save(self, number: int) -> Any:
        """What it returns ends when all is written. The training may go on."""
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return dcp.async_save({"model": model, "optimizer": optimizer}, checkpoint_id=self._checkpoint(number))

    def tensors(self) -> Iterator[Tensor]:
        """Weights and states."""
        states = self._optimizer.state_dict()["state"]
        yield from self._model.parameters()
        yield from (states[number][key] for number in sorted(states) for key in ("step", "exp_avg", "exp_avg_sq"))

    def _checkpoint(self, number: int) -> Path:
        return self._folder / "checkpoints" / str(number)


def train(training: Training, steps: int, deaths: int) -> Found:
    """deaths: in how many of its lives a rank kills itself, by turns."""
    first = training.resume()
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    doomed = life < deaths and life % RANKS == RANK
    place, last = PLACES[life % len(PLACES)], first + 2 + life % 2
    saving = None
    for number in range(first, steps):
        for at in training.step(number):
            if doomed and (number, at) == (last, place):
                os.kill(os.getpid(), signal.SIGKILL)
        if saving is not None:
            saving.result()
        saving = training.save(number)
        if doomed and (number, "save") == (last, place):
            os.kill(os.getpid(), signal.SIGKILL)
    if saving is not None:
        saving.result()
    return {"digest": digest(training.tensors()), "resumed": first, "lives": life + 1}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--deaths", type=int, default=0)
    options = parser.parse_args()
    with rank_of_job("cpu:gloo,npu:hccl") as said:
        training = Training(options.folder, plain=options.plain)
        with contextlib.closing(training):
            said |= train(training, options.steps, options.deaths)


if __name__ == "__main__":
    main()
