"""Kills trainings in the midst of steps with states on disk, and has the next one go on from the last checkpoint.

python -m ascend_emulator -m tests.optimizer.kill_steps --times 20
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEPS = 30


def train(folder: Path, spill_dir: Path | None) -> None:
    """Steps from the last checkpoint to the last step, and leaves a checkpoint after each. Says so line by line."""
    import torch

    from tests.optimizer.training import OPTIMIZERS, give_gradients, make_params
    from tiered_mem import TieringManager

    params = make_params("cpu", shapes=[(64, 64)] * 24)
    optimizer: torch.optim.Optimizer = OPTIMIZERS["adamw"](params)
    manager = None
    if spill_dir is not None:
        manager = TieringManager(
            policy="lru", device="cpu", host_bytes="16MiB", spill_dir=spill_dir, spill_bytes="64MiB"
        )
        optimizer = manager.register_optimizer(optimizer, bucket_bytes="128KiB", residency="disk")
    checkpoint = folder / "checkpoint.pt"
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        first = saved["step"] + 1
        optimizer.load_state_dict(saved["optimizer"])
        with torch.no_grad():
            for param, weight in zip(params, saved["params"], strict=True):
                param.copy_(weight)
    for step in range(first, STEPS):
        give_gradients(params, step)
        print("step", step, flush=True)
        optimizer.step()
        state = {"step": step, "optimizer": optimizer.state_dict(), "params": [p.detach() for p in params]}
        torch.save(state, folder / "new.pt")
        os.replace(folder / "new.pt", checkpoint)
    if manager is not None:
        manager.close()
    print("end", flush=True)


def start(folder: Path, spill_dir: Path | None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.optimizer.kill_steps", "--train", str(folder)]
    if spill_dir is not None:
        command += ["--spill-dir", str(spill_dir)]
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def killed(folder: Path, spill_dir: Path, chance: random.Random) -> bool:
    """One training that is killed some time after its first step has begun. False if it came to its end."""
    process = start(folder, spill_dir)
    if process.stdout is None:
        raise RuntimeError("the training says nothing")
    with process:
        for line in process.stdout:
            if line.startswith("step"):
                time.sleep(chance.uniform(0, 0.05))
                process.send_signal(signal.SIGKILL)
                break
    return process.returncode == -signal.SIGKILL


def check(times: int, seed: int) -> int:
    """How many were killed. Raises ValueError where the outcome is not that of a training that was left alone."""
    import torch

    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        alone, disturbed, spill_dir = (Path(temporary) / name for name in ("alone", "disturbed", "spill"))
        for folder in (alone, disturbed, spill_dir):
            folder.mkdir()
        kills = sum(killed(disturbed, spill_dir, chance) for _ in range(times))
        for process in (start(alone, None), start(disturbed, spill_dir)):
            process.communicate()
            if process.returncode != 0:
                raise ValueError(f"a training ended with {process.returncode}")
        if left := list(spill_dir.iterdir()):
            raise ValueError(f"left behind: {left}")
        one, other = (torch.load(folder / "checkpoint.pt") for folder in (alone, disturbed))
        if not all(torch.equal(*pair) for pair in zip(one["params"], other["params"], strict=True)):
            raise ValueError("other parameters than without kills")
        for number, state in one["optimizer"]["state"].items():
            for key, value in state.items():
                if not torch.equal(value, other["optimizer"]["state"][number][key]):
                    raise ValueError(f"another {key} of parameter {number} than without kills")
    return kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=Path, help="be the training, with its checkpoint in this folder")
    parser.add_argument("--spill-dir", type=Path)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.spill_dir)
        return
    kills = check(options.times, options.seed)
    print(f"{kills} of {options.times} trainings were killed in a step; the last one ended as if none had been")


if __name__ == "__main__":
    main()
