"""Trains a Llama of real width on a device that is too small for it, in a dry run: small_device.py BUDGET

BUDGET: of the manager, or "none". Prints a line of JSON: the bytes that were allocated at the fullest, and those
that torch's pool had.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tiered_mem import TieringManager

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama import Llama, Shape

TOKENS, STEPS = 8192, 16


def main() -> None:
    budget = None if sys.argv[1] == "none" else sys.argv[1]
    with torch.device("npu"):
        model = Llama(Shape(layers=12, width=4096, heads=32, hidden=11008), TOKENS).bfloat16()
    tokens = torch.zeros((1, TOKENS), dtype=torch.int64).to("npu")
    with TieringManager(device="npu", device_budget=budget, host_bytes="128GiB") as manager:
        manager.attach(model)
        optimizer = manager.register_optimizer(torch.optim.AdamW(model.parameters()), residency="auto")
        for _ in range(STEPS):
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    print(json.dumps({"peak": torch.npu.max_memory_allocated(), "pool": torch.npu.max_memory_reserved()}))


if __name__ == "__main__":
    main()
