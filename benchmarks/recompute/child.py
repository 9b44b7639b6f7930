"""One way to train, in a process of its own: `python -m benchmarks.recompute.child SIZE WAY STEPS CHIP`.

Writes a line of JSON for each thing that it does, and one with what was measured.
"""

from __future__ import annotations

import json
import logging
import os
import sys

import ascend_emulator

from .sizes import SIZES

_HBM = "512GiB"  # so that plain has room
_HOST = "512GiB"


def main() -> int:
    size, way, steps, chip = sys.argv[1:]
    os.environ["TIERED_MEM_HOST_LIMIT"] = _HOST  # what the modelled server has, and not this machine
    ascend_emulator.start(hbm_bytes=_HBM, host_bytes=_HOST, clock=chip, dry=True, schedule="eager", races=False)
    logging.getLogger("tiered_mem").setLevel(logging.ERROR)
    from .ways import WAYS, Asked  # torch must find the device

    there = SIZES[size]
    asked = Asked(
        there.model, there.tokens, int(there.budget * (1 << 30)), int(steps), say=lambda what: say(doing=what)
    )
    try:
        say(**WAYS[way](asked).as_dict())
    except ValueError as error:  # nothing keeps the budget
        say(error=str(error))
    return 0


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main())
