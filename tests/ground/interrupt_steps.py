"""python -m tests.ground.interrupt_steps: real SIGINTs at random moments of training steps.

The steps have activations that an LRU policy sends to the host and on to disk, a tiered optimizer, and phases.
Their models are attached, or run in a context, and the optimizers are stepped in step(), in backward, or beside the
next forward.
After each interrupt nothing may be stuck or lost: the parameters are those from before the step or from after it,
also where a part of it was made in backward and step() goes on, or an error says otherwise; the next step comes out
right, to the last bit; and closing gives everything back.

On the emulated NPU: python -m ascend_emulator -m tests.ground.interrupt_steps --device npu
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from tests.models import Stack, small_stack
from tiered_mem import TieringManager
from tiered_mem.errors import InterruptedStep
from tiered_mem.optimizer.registered import Overlap
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer
from tiered_mem.policies import LRUPolicy

# A process of its own sends them, so that this one's locks and turns have no part in when they come.
SENDER = """
import os, signal, sys, time
for line in sys.stdin:
    time.sleep(float(line))
    os.kill(os.getppid(), signal.SIGINT)
    print(flush=True)
"""
STEPS_OF_A_MANAGER = 25
STUCK_AFTER = 60.0  # seconds


class Interrupter:
    """Sends this process SIGINT, once each time, and raises KeyboardInterrupt while it is expected.

    raised: how often it has.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._expected = False
        self.raised = 0
        signal.signal(signal.SIGINT, self._handle)

    @contextmanager
    def after(self, seconds: float) -> Iterator[None]:
        """The signal comes about so long from now. Waits for it at the end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._expected = True
        self._process.stdin.write(f"{seconds}\n")
        try:
            yield
        finally:
            self._expected = False
            self._process.stdout.readline()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._expected:
            self._expected = False
            self.raised += 1
            raise KeyboardInterrupt


class Hooked(Stack):
    """Has code of the user's own in backward, which an interrupt may end there on the CPU.

    It is where no other part of the graph waits for its turn: torch would keep that, and all that it has saved.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x.register_hook(_users_own)  # type: ignore[no-untyped-call]
        return x.pow(2).mean()


def _users_own(gradient: torch.Tensor) -> None:
    sum(range(5000))


class Trainee:
    """A model whose steps all begin with the same values, so that each has the same outcome."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.model, self.x = small_stack(4, device)
        self.model.__class__ = Hooked
        self.before = self._values()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self._loss(self.model).backward()
        optimizer.step()
        self.after = self._values()
        self.model.zero_grad()
        self.reset(None)

    def step(self, manager: TieringManager, context: Any, optimizer: torch.optim.Optimizer) -> None:
        manager.offload(self.model)
        manager.offload(optimizer)
        manager.reload(self.model)
        manager.reload(optimizer)
        with context:
            loss = self._loss(self.model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.stats()

    def go_on(self, optimizer: TieredOptimizer) -> None:
        """With the step of which a part has been made already, if any. Raises InterruptedStep where it cannot."""
        if optimizer.overlap == "forward":
            optimizer.finish()
        elif optimizer.states.begun:
            optimizer.step()

    def reset(self, optimizer: torch.optim.Optimizer | None) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.before, strict=True):
                parameter.copy_(value)
        self.model.zero_grad()
        self.x.grad = None
        if optimizer is not None:
            fresh = torch.optim.AdamW(self.model.parameters(), lr=1e-2).state_dict()
            optimizer.load_state_dict(fresh)

    def is_before(self) -> bool:
        return self._is(self.before)

    def is_after(self) -> bool:
        return self._is(self.after)

    def _loss(self, model: Stack) -> torch.Tensor:
        return model(self.x)

    def _values(self) -> list[torch.Tensor]:
        return [parameter.detach().cpu().clone() for parameter in self.model.parameters()]

    def _is(self, values: list[torch.Tensor]) -> bool:
        return all(torch.equal(one, other) for one, other in zip(self._values(), values, strict=True))


class Run:
    """Steps under interrupts, with one manager after the other. findings: what was wrong, and how often."""

    def __init__(self, device: str, seed: int, overlaps: Sequence[Overlap | None]) -> None:
        self._overlaps = overlaps
        self._random = random.Random(seed)
        self._interrupter = Interrupter()
        self._trainee = Trainee(device)
        self._folder = Path(tempfile.mkdtemp(prefix="interrupts-"))
        self._usual = 0.1
        self.outcomes: Counter[str] = Counter()
        self.findings: Counter[str] = Counter()

    def close(self) -> None:
        self._interrupter.close()
        self._folder.rmdir()

    def with_a_manager(self, steps: int) -> Iterator[None]:
        """So many steps under interrupts, and after each of them one without."""
        residency = self._random.choice(["host", "disk", "device-until-offload"])
        manager = TieringManager(
            policy=LRUPolicy(device_bytes="16KiB"),
            device=self._trainee.device,
            host_bytes="512KiB",
            spill_dir=self._folder,
            spill_bytes="32MiB",
        )
        attached = self._random.random() < 0.5
        attachment = manager.attach(self._trainee.model, min_bytes=1) if attached else None
        context = nullcontext() if attached else manager.offload_context(self._trainee.model.layers, min_bytes=1)
        optimizer = manager.register_optimizer(
            torch.optim.AdamW(self._trainee.model.parameters(), lr=1e-2),
            bucket_bytes="8KiB",
            residency=residency,  # type: ignore[arg-type]
            overlap=self._random.choice(self._overlaps),
        )
        for _ in range(steps):
            faulthandler.dump_traceback_later(STUCK_AFTER, exit=True)
            self._interrupted(manager, context, optimizer)
            self._look(manager, context, optimizer)
            yield
        try:
            if attachment is not None:
                attachment.remove()
            if any(layer._forward_hooks or layer._forward_pre_hooks for layer in self._trainee.model.modules()):
                self.findings["hooks were left"] += 1
            manager.close()
        except Exception as error:
            self.findings[f"close: {error!r}"] += 1
        del optimizer, context, attachment, manager
        if list(self._folder.iterdir()):
            self.findings["files were left"] += 1
        if any(thread.name.startswith("tiered_mem") for thread in threading.enumerate()):
            self.findings["threads were left"] += 1

    def _interrupted(self, manager: TieringManager, context: Any, optimizer: TieredOptimizer) -> None:
        began, raised = time.perf_counter(), self._interrupter.raised
        try:
            with self._interrupter.after(self._random.uniform(0, self._usual)):
                self._trainee.step(manager, context, optimizer)
                self._usual = 0.9 * self._usual + 0.1 * (time.perf_counter() - began)
        except KeyboardInterrupt:
            self.outcomes["interrupted"] += 1
        except InterruptedStep:
            self.outcomes["a clear error"] += 1
        except Exception as error:
            self.findings[f"a step under an interrupt: {error!r}"] += 1
        else:
            self.outcomes["was through before"] += 1
            if self._interrupter.raised > raised:
                self.findings["an interrupt was lost"] += 1

    def _look(self, manager: TieringManager, context: Any, optimizer: TieredOptimizer) -> None:
        trainee, partly = self._trainee, False
        try:
            try:
                trainee.go_on(optimizer)
            except InterruptedStep:
                self.outcomes["a part of a step, and a clear error"] += 1
                partly = True
            manager.reload(trainee.model)
            if not partly and not (trainee.is_before() or trainee.is_after()):
                self.findings["parameters are partly from before"] += 1
            trainee.reset(optimizer)
            manager.synchronize()
            stats = manager.stats()
            for name in stats:
                if name.endswith("blocks.current") and stats[name]:
                    self.findings[f"{name} is {stats[name]}"] += 1
            if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                self.findings["hooks for saved tensors were left"] += 1
            trainee.step(manager, context, optimizer)
            if not trainee.is_after():
                self.findings["the next step is wrong"] += 1
            trainee.reset(optimizer)
        except Exception as error:
            self.findings[f"after an interrupt: {error!r}"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=1000, help="how many signals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--overlap", choices=("backward", "forward"), help="of all optimizers; else any, or none")
    options = parser.parse_args()
    console = Console()
    run = Run(options.device, options.seed, [options.overlap] if options.overlap else [None, "backward", "forward"])
    parts = [min(STEPS_OF_A_MANAGER, options.times - done) for done in range(0, options.times, STEPS_OF_A_MANAGER)]
    steps = itertools.chain.from_iterable(map(run.with_a_manager, parts))
    for _ in track(steps, description="interrupts", total=options.times, console=console):
        """Each counts what it finds."""
    faulthandler.cancel_dump_traceback_later()
    run.close()
    for what, count in (*run.outcomes.most_common(), *run.findings.most_common()):
        console.print(f"{count:6}  {what}", highlight=False, markup=False)
    console.print(f"{sum(run.findings.values())} findings")
    sys.exit(bool(run.findings))


if __name__ == "__main__":
    main()
