"""What of a model's activations moves when it is attached with two lines, and at which peak of device memory it trains.

Each model of benchmarks/model_zoo.py trains a few steps three times: plain; attached with policy="layer-order"; and
attached with policy="auto" and a budget that leaves room for half of its activations. Losses, and the gradients of
the last step, are compared bit by bit.

    make models      # sets up what this needs, and runs it on the emulated NPU
    python -m benchmarks.models --only Llama Swin --steps 2

The exit status is 1 where a number differs from the plain run's.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.model_zoo import MODELS, ZooModel
from examples.devices import find_device
from tiered_mem import TieringManager

LARGE = 1 << 20
MIB = float(1 << 20)


@dataclass(frozen=True)
class Saved:
    """Bytes of distinct storages that one forward saves for backward, without weights and buffers.

    large: of those that have 1 MiB and more.
    """

    all: int
    large: int


@dataclass(frozen=True)
class Trained:
    """losses, gradients: on the CPU, those of each step and of the last. peak: the most bytes allocated."""

    losses: list[torch.Tensor]
    gradients: list[torch.Tensor]
    peak: int

    def equals(self, other: Trained) -> bool:
        """Bit by bit."""
        ours, theirs = (each.losses + each.gradients for each in (self, other))
        return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@dataclass(frozen=True)
class Row:
    """Sizes in bytes. moved: share of the saved bytes of 1 MiB and more that left the device in a step."""

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


class Peak:
    """The most that is allocated on the device, by the steps of torch's allocator.

    torch's own figure would not do: policy="auto" resets it.
    """

    def __init__(self, device: ModuleType) -> None:
        self._device = device
        device.memory._record_memory_history(max_entries=10_000_000, context=None, stacks="python")
        self._before = device.memory_allocated()

    def read(self) -> int:
        trace = self._device.memory._snapshot()["device_traces"][0]
        self._device.memory._record_memory_history(enabled=None)
        now = most = self._before
        for entry in trace:
            now += {"alloc": 1, "free_completed": -1}.get(entry["action"], 0) * entry["size"]
            most = max(most, now)
        return most


class Bench:
    """One model on one device."""

    def __init__(self, name: str, kind: str, steps: int) -> None:
        self._name = name
        self._kind = kind
        self._device: ModuleType = getattr(torch, kind)
        self._steps = steps

    def run(self) -> Row:
        saved = self._saved()
        plain, _ = self._train()
        ordered, moved = self._train(policy="layer-order")
        budget = plain.peak - saved.all // 2
        automatic, _ = self._train(policy="auto", device_budget=budget)
        return Row(
            self._name,
            self._zoo_model.library,
            saved.all,
            saved.large,
            plain.peak,
            moved / self._steps / saved.large,
            ordered.peak,
            ordered.equals(plain),
            budget,
            automatic.peak,
            automatic.equals(plain),
        )

    @property
    def _zoo_model(self) -> ZooModel:
        return MODELS[self._name]

    def _make(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return self._zoo_model.make().to(self._kind).train()

    def _loss(self, model: torch.nn.Module) -> torch.Tensor:
        return self._zoo_model.loss(model, lambda tensor: tensor.to(self._kind))

    def _saved(self) -> Saved:
        """Of a forward without a manager."""
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

    def _train(self, **manager: str | int) -> tuple[Trained, int]:
        """A few steps, plain, or with a manager of these arguments; and how many bytes it moved to the host."""
        gc.collect()
        self._device.synchronize()
        self._device.empty_cache()
        with ExitStack() as exits:
            managed = None
            if manager:
                managed = exits.enter_context(TieringManager(device=self._kind, host_bytes="2GiB", **manager))
            model = self._make()
            if managed is not None:
                exits.enter_context(managed.attach(model))
            trained = self._steps_of(model)
            return trained, 0 if managed is None else int(managed.stats()["offloaded.bytes.total"])

    def _steps_of(self, model: torch.nn.Module) -> Trained:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        peak = Peak(self._device)
        losses = []
        for step in range(self._steps):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = self._loss(model)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())
        gradients = [each.grad.cpu() for each in model.parameters() if each.grad is not None]
        return Trained(losses, gradients, peak.read())


def table_of(rows: Sequence[Row]) -> Table:
    """Sizes in MiB."""
    table = Table("model", "of", "saved", "plain peak", "moved", "layer-order peak", "auto budget", "auto peak", "equal")
    for row in rows:
        table.add_row(*cells(row))
    return table


def cells(row: Row) -> list[str]:
    sizes = [f"{size / MIB:.0f}" for size in (row.saved, row.plain_peak, row.layer_order_peak, row.budget, row.auto_peak)]
    equal = "yes" if row.layer_order_equal and row.auto_equal else "NO"
    return [row.model, row.library, *sizes[:2], f"{row.moved:.0%}", *sizes[2:], equal]


def main() -> None:
    options = parse()
    kind = find_device("-m benchmarks.models")
    console = Console()
    names = options.only or list(MODELS)
    rows = [Bench(name, kind, options.steps).run() for name in track(names, "models", console=console)]
    console.print(table_of(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    sys.exit(any(not (row.layer_order_equal and row.auto_equal) for row in rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), help="these models, in place of all")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
