"""A training of Llama 2 7B in a dry run: `python -m benchmarks.pictures.child WAY TOKENS BUDGET STEPS PICTURE`.

WAY is "plain", or "tiered": within a BUDGET of GiB, by policy="auto". Writes a line of JSON for each step, and one
with the memory over the last of them, which the manager, if there is one, draws to PICTURE.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import ascend_emulator

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

_CHIP = "910b3"
_ROOM = "512GiB"  # of the device and of the host, so that plain fits


def main() -> int:
    way, tokens, budget, steps, picture = sys.argv[1:]
    os.environ["TIERED_MEM_HOST_LIMIT"] = _ROOM  # what the modelled server has, and not this machine
    ascend_emulator.start(hbm_bytes=_ROOM, host_bytes=_ROOM, clock=_CHIP, dry=True, schedule="eager", races=False)
    logging.getLogger("tiered_mem").setLevel(logging.ERROR)
    import torch  # must find the device
    from llama import SHAPES, Llama

    from tiered_mem import TieringManager

    from .memory import MemoryOverTime

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("npu"):  # made there, a dry run's weights take no memory here
        model = Llama(SHAPES["7b"], int(tokens))
    torch.set_default_dtype(torch.float32)
    words = torch.zeros((1, int(tokens)), dtype=torch.int64).to("npu")
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    manager = None
    if way == "tiered":
        manager = TieringManager(
            device_budget=f"{budget}GiB", device="npu", host_bytes="400GiB", preallocate=False, trace=True
        )
        manager.attach(model)
        optimizer = manager.register_optimizer(optimizer, residency="auto")
    seconds, found = [], {}
    for number in range(int(steps)):
        say(doing=f"step {number + 1} of {steps}")
        torch.npu.synchronize()
        began = ascend_emulator.now()
        # Looked at is the last step alone, which takes as long as the one before it.
        memory = MemoryOverTime(model) if number == int(steps) - 1 else None
        with memory or nullcontext():
            loss = model(words, words)
            if memory is not None:
                memory.part("backward")
            loss.backward()
            del loss
            if memory is not None:
                memory.part("optimizer")
            optimizer.step()
            optimizer.zero_grad()
            if memory is not None:
                found = memory.found()
        torch.npu.synchronize()
        seconds.append(ascend_emulator.now() - began)
    report = ""
    if manager is not None:
        report = str(manager.report())
        manager.plot(picture, steps=1)
        manager.close()
    say(**found, seconds=seconds, report=report)
    return 0


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main())
