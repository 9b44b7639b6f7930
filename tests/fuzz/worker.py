"""One process of the fuzz: judges cases one after the other, and tells of each in a line of JSON on stdout."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import logging
import os
import sys
import time
import warnings

import ascend_emulator
import torch

from tests.fuzz.case import draw_case
from tests.fuzz.verdict import judge

# A case takes less than a second. Beside other processes it may take many.
HANGS_AFTER_S = 120.0


def work(options: argparse.Namespace) -> None:
    """Cases `first`, `first + stride` and so on, as long as time is left and the device works."""
    deadline = time.monotonic() + options.seconds
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    races = options.device == "npu"
    if options.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS need not repeat itself
        torch.use_deterministic_algorithms(True, warn_only=True)
    gc.collect()
    gc.disable()
    gc.freeze()
    number = options.first
    while True:
        tell(case=number, kind="begins")
        # The last one goes on until the process has ended.
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        verdict = judge(draw_case(number, options.device, calls=options.layers), races=races)
        tell(case=number, kind=verdict.kind, why=verdict.why, text=verdict.text, moved=verdict.moved)
        gc.collect()  # what is a cycle in torch or in a traceback; a leak has shown by now
        number += options.stride
        if races:
            ascend_emulator.clear_races()
        if options.once or time.monotonic() > deadline or not works(options.device):
            return


def works(device: str) -> bool:
    """Whether the device still does what it is told. Some kernels fail, and with them all that comes after."""
    try:
        torch.zeros(1).to(device).cpu()
    except RuntimeError:
        return False
    return True


def tell(**line: object) -> None:
    print(json.dumps(line), file=sys.stdout, flush=True)
