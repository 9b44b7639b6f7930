"""A training that is planned: a step of it on the emulated device in a dry run, and what is known of it then."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import ascend_emulator
import torch
from ascend_emulator import Span
from llama import Llama, Shape

from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy

COPIES = ("copy_d2h", "copy_h2d")


@dataclass
class Planned:
    """Peaks in bytes; modelled seconds of a step, of its kernels and copies, and of copies while kernels ran.

    out_of_memory: what torch said where the device's memory did not suffice. Times are not known then.
    """

    name: str
    out_of_memory: str | None = None
    peak_device: int = 0
    peak_host: int = 0
    step: float = 0
    compute: float = 0
    copies: float = 0
    hidden: float = 0


class Plan:
    """Trains a Llama in bfloat16, with AdamW, from batches of the shape (batch, tokens)."""

    def __init__(self, shape: Shape, *, batch: int, tokens: int, host_bytes: str) -> None:
        self._shape = shape
        self._tokens = (batch, tokens)
        self._host_bytes = host_bytes

    def plain(self) -> Planned:
        return self._measured("plain", self._train)

    def tiered(self, layers: int) -> Planned:
        """The optimizer's states and the activations of that many layers leave the device."""
        return self._measured(f"tiered, {layers} layers", partial(self._train_tiered, layers))

    def _train_tiered(self, layers: int, planned: Planned) -> None:
        model = self._model()
        policy = LayerOrderPolicy(layers, in_flight=1)
        with TieringManager(policy=policy, device="npu", host_bytes=self._host_bytes) as manager:
            optimizer = manager.register_optimizer(torch.optim.AdamW(model.parameters()))
            try:
                self._steps(planned, model, optimizer, manager.offload_context(model.layers))
            finally:
                planned.peak_host = int(manager.stats()["host.used.peak"])

    def _train(self, planned: Planned) -> None:
        model = self._model()
        self._steps(planned, model, torch.optim.AdamW(model.parameters()), nullcontext())

    def _model(self) -> Llama:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("npu"):  # made there, it takes no memory here
                return Llama(self._shape, self._tokens[1])
        finally:
            torch.set_default_dtype(before)

    def _steps(
        self,
        planned: Planned,
        model: Llama,
        optimizer: torch.optim.Optimizer,
        offload: AbstractContextManager[object],
    ) -> None:
        """Two steps: in the first one the optimizer makes its states, the second one counts."""
        tokens = torch.zeros(self._tokens, dtype=torch.int64).to("npu")
        for _ in range(2):
            began = ascend_emulator.now()
            with ascend_emulator.record_timeline() as spans:
                with offload:
                    loss = model(tokens, tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                torch.npu.synchronize()
            planned.step = ascend_emulator.now() - began
        copies = [span for span in spans if span.name in COPIES]
        kernels = [span for span in spans if span.name not in COPIES]
        planned.compute, planned.copies = taken(kernels), taken(copies)
        planned.hidden = planned.compute + planned.copies - taken([*kernels, *copies])

    def _measured(self, name: str, train: Callable[[Planned], None]) -> Planned:
        planned = Planned(name)
        torch.npu.reset_peak_memory_stats()
        try:
            train(planned)
        except torch.OutOfMemoryError as error:
            planned.out_of_memory = str(error).split(" (")[0]
        planned.peak_device = torch.npu.max_memory_allocated()
        gc.collect()
        torch.npu.empty_cache()
        return planned


def taken(spans: Sequence[Span]) -> float:
    """The seconds in which at least one of them was under way."""
    seconds, end = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start):
        seconds += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return seconds
