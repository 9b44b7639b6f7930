"""A step of Llama 2 in bfloat16 with AdamW, on a modelled NPU, and what its parts take."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import ascend_emulator
import torch

from benchmarks.peak import Peak
from tiered_mem import TieringManager
from tiered_mem.device.torch_private import AsPlainTensors
from tiered_mem.optimizer.registered import Overlap, Residency

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama import SHAPES, Llama


@dataclass(frozen=True)
class Taken:
    """Modelled seconds, and the most bytes of device memory."""

    forward: float
    backward: float
    optimizer: float
    peak: int

    @property
    def step(self) -> float:
        return self.forward + self.backward + self.optimizer

    def as_dict(self) -> dict[str, float]:
        return asdict(self) | {"step": self.step}


class Step:
    """manager: has the optimizer's states where `residency` says; None leaves them on the device."""

    def __init__(
        self,
        model: str,
        tokens: int,
        manager: TieringManager | None,
        residency: Residency = "host",
        overlap: Overlap | None = None,
    ) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("npu"):  # made there, a dry run's weights take no memory here
            self.model = Llama(SHAPES[model], tokens)
        torch.set_default_dtype(before)
        self._tokens = torch.zeros((1, tokens), dtype=torch.int64).to("npu")
        self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        if manager is not None:
            self._optimizer = manager.register_optimizer(self._optimizer, residency=residency, overlap=overlap)

    def run(self) -> Taken:
        """As one of many in a row: the host waits for compute, and copies of the step before may go on."""
        torch.npu.current_stream().synchronize()
        peak = Peak(torch.npu)
        times = [ascend_emulator.now()]
        loss = self._loss()
        torch.npu.current_stream().synchronize()
        times.append(ascend_emulator.now())
        loss.backward()
        torch.npu.current_stream().synchronize()
        times.append(ascend_emulator.now())
        self._update()
        torch.npu.current_stream().synchronize()
        times.append(ascend_emulator.now())
        forward, backward, optimizer = (end - begin for begin, end in pairwise(times))
        return Taken(forward, backward, optimizer, peak.read())

    def gradients(self) -> int:
        """The most bytes of gradients that there are at once in a step, which is made for that."""
        loss = self._loss()
        weights = list(self.model.parameters())
        sums: list[int] = []

        def one_more(gradient: torch.Tensor) -> None:
            with AsPlainTensors():  # weights that have been stepped let nobody ask for their gradients
                there = sum(weight.grad.nbytes for weight in weights if weight.grad is not None)
            sums.append(there + gradient.nbytes)

        handles = [weight.register_hook(one_more) for weight in weights]
        loss.backward()
        for handle in handles:
            handle.remove()
        self._update()
        return max(sums)

    def _loss(self) -> torch.Tensor:
        return self.model(self._tokens, self._tokens)  # type: ignore[no-any-return]

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()
