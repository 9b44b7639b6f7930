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
    """manager: has the optimizer's states on the host; None leaves them on the device."""

    def __init__(self, model: str, tokens: int, manager: TieringManager | None) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("npu"):  # made there, a dry run's weights take no memory here
            self.model = Llama(SHAPES[model], tokens)
        torch.set_default_dtype(before)
        self._tokens = torch.zeros((1, tokens), dtype=torch.int64).to("npu")
        self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        if manager is not None:
            self._optimizer = manager.register_optimizer(self._optimizer, residency="host")

    def run(self) -> Taken:
        """From an idle device to an idle device. In between the host waits for compute, and not for copies."""
        torch.npu.synchronize()
        peak = Peak(torch.npu)
        times = [ascend_emulator.now()]
        loss = self.model(self._tokens, self._tokens)
        torch.npu.current_stream().synchronize()
        times.append(ascend_emulator.now())
        loss.backward()
        torch.npu.current_stream().synchronize()
        times.append(ascend_emulator.now())
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch.npu.synchronize()
        times.append(ascend_emulator.now())
        forward, backward, optimizer = (end - begin for begin, end in pairwise(times))
        return Taken(forward, backward, optimizer, peak.read())
