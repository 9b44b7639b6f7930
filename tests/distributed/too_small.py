"""Trains where the budget of one rank is too small: too_small.py RANK WAY...

Run by torch.distributed.run. A way is a schedule of `pipeline`, or one of `models` to spread a Llama. The rank has
a fiftieth of the memory that its training takes, and the others have all of theirs. Each rank prints a line of
JSON: for each way what it ended with, and what it has logged of that. Nothing can follow a pipeline, as its ranks
have begun to receive what nobody will send.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from emulator.tests.hccl_rank import RANK
from tests.distributed import pipeline, training
from tests.distributed.contest import planned
from tiered_mem import BudgetTooSmall


@contextmanager
def logged() -> Iterator[list[str]]:
    """What is logged inside of how ranks agree."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tiered_mem.agreement")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def end(way: str, small: int) -> dict[str, Any]:
    train: Any = pipeline.train if way in pipeline.SCHEDULES else training.train
    peak = train(way)["peak"]
    said = ""
    with logged() as lines:
        try:
            train(way, partial(planned, peak / 50 if small == RANK else peak, pipeline.HOST_BYTES))
        except BudgetTooSmall as error:
            said = str(error)
        except RuntimeError as error:  # by which torch's stages tell of an error in a forward
            said = str(error.__cause__)
    return {"said": said, "logged": lines}


def main() -> None:
    torch.npu.set_device(RANK)
    dist.init_process_group("hccl")
    small, *ways = sys.argv[1:]
    found = {way: end(way, int(small)) for way in ways}
    print(json.dumps({"rank": RANK} | found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
