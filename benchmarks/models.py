"""What of a model's activations moves when it is attached with two lines, and the peaks of device memory.

Each model of benchmarks/model_zoo.py trains a few steps three times: plain; attached with policy="layer-order"; and
attached with policy="auto" and a budget that leaves room for half of its activations. Losses, and the gradients of
the last step, are compared bit by bit.

    make models      # sets up what this needs, and runs it on the emulated NPU
    python -m benchmarks.models --only Llama Swin --steps 2

The exit status is 1 where a number differs from the plain run's, less than 85 % moves, or a budget is not kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.model_zoo import MODELS
from benchmarks.peak import Peak
from examples.devices import find_device
from tiered_mem import TieringManager

LARGE = 1 << 20
LEAST_MOVED = 0.85
DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- benchmarks/models.py -->\n", "<!-- end of benchmarks/models.py -->\n"


@dataclass(frozen=True)
class Saved:
    """Bytes of distinct storages that one forward saves for backward, without weights and buffers.

    large: of those that have 1 MiB and more.
    """

    all: int
    large: int


@dataclass(frozen=True)
class Trained:
    """losses, gradients: on the CPU, those of each step and of the last. peak: the most bytes allocated.

    moved: bytes that went to the host in each step.
    """

    losses: list[torch.Tensor]
    gradients: list[torch.Tensor]
    peak: int
    moved: float

    def equals(self, other: Trained) -> bool:
        """Bit by bit."""
        ours, theirs = (each.losses + each.gradients for each in (self, other))
        return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@dataclass(frozen=True)
class Row:
    """Sizes in bytes. moved: share of the saved bytes of 1 MiB and more that went to the host in a step."""

    model: str
    library: str
    saved: int
    saved_large: int
    plain_peak: int
    moved: float
    layer_order_peak: int
    layer_order_equal: bool
    budget: int
    auto_peak: int
    auto_equal: bool

    @property
    def equal(self) -> bool:
        return self.layer_order_equal and self.auto_equal

    @property
    def holds(self) -> bool:
        """Whether it is as docs/models.md says."""
        return self.equal and self.moved >= LEAST_MOVED and self.auto_peak <= self.budget

    def cells(self) -> list[str]:
        """Sizes in MiB."""
        saved, plain, ordered, budget, automatic = (
            f"{size / 2**20:.0f}"
            for size in (self.saved, self.plain_peak, self.layer_order_peak, self.budget, self.auto_peak)
        )
        equal = "yes" if self.equal else "NO"
        return [self.model, self.library, saved, plain, f"{self.moved:.0%}", ordered, budget, automatic, equal]


HEADINGS = (
    "model",
    "library",
    "saved",
    "plain: peak",
    "layer-order: moved",
    "layer-order: peak",
    "auto: budget",
    "auto: peak",
    "equal bits",
)


class Bench:
    """One model of the zoo on one device. steps: how many it trains, each time."""

    def __init__(self, name: str, kind: str, steps: int) -> None:
        self._name = name
        self._kind = kind
        self._device: ModuleType = getattr(torch, kind)
        self._steps = steps

    def run(self) -> Row:
        saved = self.saved()
        plain = self.train()
        ordered = self.train(policy="layer-order")
        budget = plain.peak - saved.all // 2
        automatic = self.train(policy="auto", device_budget=budget)
        return Row(
            model=self._name,
            library=MODELS[self._name].library,
            saved=saved.all,
            saved_large=saved.large,
            plain_peak=plain.peak,
            moved=ordered.moved / saved.large,
            layer_order_peak=ordered.peak,
            layer_order_equal=ordered.equals(plain),
            budget=budget,
            auto_peak=automatic.peak,
            auto_equal=automatic.equals(plain),
        )

    def saved(self) -> Saved:
        """What a plain forward saves."""
        model = self._make()
        others = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == self._kind and (storage := tensor.untyped_storage())._cdata not in others:
                storages[storage._cdata] = storage
            return tensor.detach()

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            self._loss(model)
        sizes = [storage.nbytes() for storage in storages.values()]
        return Saved(sum(sizes), sum(size for size in sizes if size >= LARGE))

    def train(self, **arguments: str | int) -> Trained:
        """A few steps, plain, or with the model attached to a manager of these arguments."""
        gc.collect()
        self._device.synchronize()
        self._device.empty_cache()
        with ExitStack() as exits:
            model = self._make()
            manager = None
            if arguments:
                manager = exits.enter_context(TieringManager(device=self._kind, preallocate=False, **arguments))
                manager.attach(model)
            peak = Peak(self._device)
            losses = self._train(model)
            gradients = [each.grad.cpu() for each in model.parameters() if each.grad is not None]
            moved = 0 if manager is None else int(manager.stats()["offloaded.bytes.total"])
            return Trained(losses, gradients, peak.read(), moved / self._steps)

    def _train(self, model: torch.nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        losses = []
        for step in range(self._steps):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = self._loss(model)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())
        return losses

    def _make(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return MODELS[self._name].make().to(self._kind).train()

    def _loss(self, model: torch.nn.Module) -> torch.Tensor:
        return MODELS[self._name].loss(model, lambda tensor: tensor.to(self._kind))


def main() -> None:
    options = parse()
    console = Console()
    kind = find_device("-m benchmarks.models")
    names = options.only or list(MODELS)
    rows = [Bench(name, kind, options.steps).run() for name in track(names, "models", console=console)]
    table = Table(*HEADINGS)
    for row in rows:
        table.add_row(*row.cells())
    console.print(table, "Sizes in MiB.")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options.write:
        write(rows)
    sys.exit(not all(row.holds for row in rows))


def write(rows: Sequence[Row]) -> None:
    """Puts the table into the document, in place of the one that is there."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *(row.cells() for row in rows)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    before, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(before + BEGIN + table + END + rest.split(END)[1])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), help="these models, in place of all")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--write", action="store_true", help="also put the table into docs/models.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
