"""Steps of one chip's rows, modelled: run by study.py as a program of its own, under the emulator's clock.

    python -m ascend_emulator --clock a100 --dry -m benchmarks.published.step a100 NAME ...

Prints the modelled milliseconds of each named row's step, a line for each.
"""

import gc
import sys
from collections.abc import Callable

import torch
from ascend_emulator import now
from torch_npu import npu  # type: ignore[import-untyped]

from benchmarks.published import traffic
from benchmarks.published.host_bound import host_bound_seconds
from benchmarks.published.kernels import KERNELS
from benchmarks.published.models import Decoder
from benchmarks.published.optimizers import OPTIMIZERS
from benchmarks.published.rows import Row, read_rows
from benchmarks.published.shapes import SHAPES


def main() -> None:
    chip, *names = sys.argv[1:]
    rows = {row.name: row for row in read_rows() if row.chip == chip}
    for name in names:
        row = rows[name]
        print(1e3 * (host_bound_seconds(row) if row.host_bound else modelled_seconds(row)), flush=True)
        gc.collect()


def modelled_seconds(row: Row) -> float:
    """Of a row's step."""
    shape = SHAPES[row.model]
    slowest = Stage(row, first=row.pipeline == 1, last=True).seconds()
    others = Stage(row, first=True, last=False).seconds() if row.pipeline > 1 else None
    return traffic.step_seconds(row, shape, slowest, others)


class Stage:
    """One card's part of a row: layers, a micro batch, and an optimizer."""

    def __init__(self, row: Row, first: bool, last: bool) -> None:
        self._accumulate, shape = row.accumulate, SHAPES[row.model]
        size = row.micro_batch, row.sequence
        with torch.device("npu"):
            self._model = Decoder(
                shape,
                KERNELS[row.kernels](),
                row.sequence,
                row.document or row.sequence,
                row.recompute,
                -(-shape.layers // row.pipeline),
                first,
                last,
            ).bfloat16()
            self._optimizer = OPTIMIZERS[row.optimizer](self._model, row.cards // row.pipeline)
            self._targets = torch.zeros(size, dtype=torch.int64)
            between = torch.zeros(*size, shape.hidden, dtype=torch.bfloat16)
        self._inputs = self._targets if first else between.requires_grad_()
        self._gradient = None if last else between

    def seconds(self) -> traffic.Seconds:
        """Of the second step, the first one having made the optimizer's states.

        Of the micro batches two are computed; all others take as long as the second.
        """
        for _ in range(2):
            begin = self._timed(self._micro_batch)
            each = self._timed(self._micro_batch) if self._accumulate > 1 else begin
            update = self._timed(self._optimizer.step)
        return traffic.Seconds(begin + (self._accumulate - 1) * each, each, update)

    def _micro_batch(self) -> None:
        self._model(self._inputs, self._targets).backward(self._gradient)

    def _timed(self, work: Callable[[], None]) -> float:
        begin = now()
        work()
        npu.synchronize()
        return now() - begin


if __name__ == "__main__":
    main()
