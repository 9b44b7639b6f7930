"""Kills processes that save an optimizer's states over those of an earlier save, and loads what is there then.

python -m tests.optimizer.kill_saves

Prints how many were killed when the earlier save was there and is whole, and how many when the new one was.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from tests.optimizer.training import OPTIMIZERS, Outcome, differences, make_params, outcome, train
from tiered_mem import TieringManager
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer

# What changes files and folders, as Python names these calls to its audit hooks. safetensors' own are not there.
CALLS = {"open", "os.mkdir", "os.chmod", "os.rename", "os.remove", "os.rmdir", "os.listdir", "fcntl.flock"}


class Trainee:
    """Parameters on the CPU and their optimizer."""

    def __init__(self, *steps: int) -> None:
        self.params = make_params("cpu")
        self.manager = TieringManager(policy="lru", device="cpu", host_bytes="1MiB")
        made = self.manager.register_optimizer(OPTIMIZERS["adamw"](self.params), bucket_bytes=2000)
        assert isinstance(made, TieredOptimizer)
        self.optimizer = made
        train(self.optimizer, self.params, steps)

    def states(self) -> Outcome:
        return Outcome([], outcome(self.optimizer, self.params).state_dict)


def killed_at(call: int, trainee: Trainee, folder: Path) -> bool:
    """Saves in a process that is killed before this call. False if it came to its end."""
    pid = os.fork()
    if pid == 0:
        left = call

        def count(event: str, args: object) -> None:
            nonlocal left
            if event in CALLS:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        trainee.optimizer.save(folder)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    end = os.waitstatus_to_exitcode(status)
    if end not in (0, -signal.SIGKILL):
        raise ValueError(f"the process ended with {end}")
    return end != 0


def main() -> None:
    torch.set_num_threads(1)  # a forked process has one
    earlier, later, loaded = Trainee(0), Trainee(0, 1, 2), Trainee(5)
    found: Counter[str] = Counter(before=0, after=0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "saved"
        call = 1
        while True:
            shutil.rmtree(folder, ignore_errors=True)
            earlier.optimizer.save(folder)
            killed = killed_at(call, later, folder)
            loaded.optimizer.load(folder)
            whole = [each for each in (earlier, later) if not differences(each.states(), loaded.states())]
            if len(whole) != 1:
                raise ValueError(f"killed before call {call}, and the states are those of neither save")
            if not killed:
                break
            found["before" if whole == [earlier] else "after"] += 1
            later.optimizer.save(folder)
            if len(list(folder.iterdir())) != 2:
                raise ValueError(f"killed before call {call}, and left behind: {sorted(folder.iterdir())}")
            call += 1
    for each in (earlier, later, loaded):
        each.manager.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
