"""Trainings whose steps change, with policy="auto", in a dry run on the modelled clock.

    python -m ascend_emulator --clock 910b3 --dry --hbm 2GiB -m tests.manager.changing_steps lengths

Prints the seconds of each step beside those of one that was planned for by itself, as JSON. The device has no more
memory than it says there, so that a step above the budget ends in torch.OutOfMemoryError.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import ascend_emulator
import torch

from tiered_mem import TieringManager

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama import Llama, Shape

LONGEST = 2048
BATCH = 2
WIDTH = 4096


class Trunk(Llama):
    """Without the table of words and the logits, in a device this small far larger than all else."""

    def __init__(self) -> None:
        super().__init__(Shape(layers=8, width=WIDTH, heads=32, hidden=11008), LONGEST)
        del self.tokens, self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        turn = self.cosines[: x.shape[1]], self.sines[: x.shape[1]]
        for layer in self.layers:
            x = layer(x, turn)
        return self.norm(x).float().pow(2).mean()


class Training:
    """A model, and steps of it whose modelled seconds are told."""

    def __init__(self) -> None:
        with torch.device("npu"):
            self._model = Trunk().bfloat16()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)

    def seconds(self, lengths: Iterable[int], slower_at: int | None = None) -> list[float]:
        """Of steps of these lengths, in a manager of their own. slower_at: before this one the link slows down."""
        found = []
        with TieringManager(host_bytes="16GiB") as manager, manager.attach(self._model):
            for number, length in enumerate(lengths):
                if number == slower_at:
                    slow_down()
                x = torch.zeros((BATCH, length, WIDTH), dtype=torch.bfloat16, device="npu")
                torch.npu.synchronize()
                begun = ascend_emulator.now()
                self._model(x).backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
                torch.npu.synchronize()
                found.append(ascend_emulator.now() - begun)
        return found


FAST, SLOW = "32GB/s", "16GB/s"


def slow_down() -> None:
    ascend_emulator.configure(h2d_bytes_per_s=SLOW, d2h_bytes_per_s=SLOW)


def lengths(training: Training) -> dict[str, list[float]]:
    """300 steps of any of sixteen lengths."""
    rng = random.Random(0)
    drawn = [rng.randrange(LONGEST // 16, LONGEST + 1, LONGEST // 16) for _ in range(300)]
    alone = {length: training.seconds([length] * 3)[-1] for length in sorted(set(drawn))}
    return {"changing": training.seconds(drawn), "alone": [alone[length] for length in drawn]}


def link(training: Training) -> dict[str, list[float]]:
    """Sixteen equal steps. The link becomes half as fast before each of four of them in turn."""
    found: dict[str, list[float]] = {}
    for slower_at in range(4, 8):
        ascend_emulator.configure(h2d_bytes_per_s=FAST, d2h_bytes_per_s=FAST)
        found[f"slower at {slower_at}"] = training.seconds([LONGEST] * 16, slower_at)
    found["slow"] = training.seconds([LONGEST] * 3)
    return found


def main() -> None:
    kinds = {"lengths": lengths, "link": link}
    print(json.dumps(kinds[sys.argv[1]](Training())))


if __name__ == "__main__":
    main()
