"""Steps of one chip's rows, modelled: run by study.py as a program of its own, under the emulator's clock.

    python -m ascend_emulator --clock a100 --dry -m published.step a100 NAME ...

Prints the modelled milliseconds of each named row's step, a line for each.
"""

import gc
import sys

import torch
from ascend_emulator import now
from torch import Tensor

from published import traffic
from published.kernels import KERNELS
from published.models import Decoder
from published.optimizers import OPTIMIZERS
from published.rows import Row, read_rows
from published.shapes import SHAPES


def main() -> None:
    chip, *names = sys.argv[1:]
    rows = {row.name: row for row in read_rows() if row.chip == chip}
    for name in names:
        print(1e3 * modelled_seconds(rows[name]), flush=True)
        gc.collect()


def modelled_seconds(row: Row) -> float:
    return Training(row).seconds()


class Training:
    """A row's model, batch and optimizer on one card."""

    def __init__(self, row: Row) -> None:
        self._row, self._shape = row, SHAPES[row.model]
        torch.set_default_device("npu")
        torch.set_default_dtype(torch.bfloat16)
        layers = -(-self._shape.layers // row.pipeline)
        self._model = Decoder(
            self._shape, KERNELS[row.kernels](), row.sequence, row.document or row.sequence, row.recompute, layers
        )
        self._optimizer = OPTIMIZERS[row.optimizer](self._model, row.cards // row.pipeline)
        size = row.micro_batch, row.sequence
        self._targets = torch.zeros(size, dtype=torch.int64)
        self._inputs: Tensor = self._targets
        if row.pipeline > 1:
            self._inputs = torch.zeros(*size, self._shape.hidden, requires_grad=True)

    def seconds(self) -> float:
        """Of the second step, the first one having made the optimizer's states.

        Of the micro batches two are computed; all others take as long as the second.
        """
        for _ in range(2):
            first, update = self._timed(self._micro_batch), 0.0
            second = self._timed(self._micro_batch) if self._row.accumulate > 1 else first
            update = self._timed(self._optimizer.step)
        computed = first + (self._row.accumulate - 1) * second
        return traffic.step_seconds(self._row, self._shape, computed, second, update)

    def _micro_batch(self) -> None:
        self._model(self._inputs, self._targets).backward()

    def _timed(self, work) -> float:  # type: ignore[no-untyped-def]
        begin = now()
        work()
        torch.npu.synchronize()
        return now() - begin


if __name__ == "__main__":
    main()
