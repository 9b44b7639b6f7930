"""A small GPT's training with the library and without it, to the bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ..manager import TieringManager
from ..optimizer.registered import Residency
from ..policies import LayerOrderPolicy
from ..policies.actions import How
from ..policies.planning.profile import BudgetTooSmall
from ..sizes import format_bytes
from ..spill.disk_tier import DiskTier
from ..spill.filesystem import Files
from .bench import Bench
from .drive import RECORDS
from .failing_files import FailingFiles
from .order import ARRIVED, RELEASED
from .outcome import Check, Outcome, failed, not_applicable, passed
from .training import Trained, train

_REPEATS = "a training repeats itself"
_MOVED = "offloaded.bytes.total"
_HOST, _LITTLE_HOST, _DISK = "512MiB", "8MiB", 256 << 20
# Of what a step takes above what is always there. Kernels' own memory differs between devices.
_BUDGETS = (0.6, 0.75, 0.9)


def equality() -> list[Check]:
    needs = (_REPEATS, ARRIVED, RELEASED)
    disk = (*needs, RECORDS)
    return [
        Check(_REPEATS, _repeats),
        Check("offload", _offload, needs),
        Check('policy="auto"', _auto, needs, "torch counts no memory of the cpu that could be planned"),
        Check("recompute, full", partial(_recompute, how="full"), needs),
        Check("recompute, cheap", partial(_recompute, how="cheap"), needs),
        Check("disk spill", _spill, disk),
        Check("optimizer on the host", partial(_optimizer, residency="host"), needs),
        Check("optimizer on disk", partial(_optimizer, residency="disk"), disk),
        Check("phases", _phases, needs),
        Check("a failing drive", partial(_without_drive, code="EIO"), disk),
        Check("a full drive", partial(_without_drive, code="ENOSPC"), disk),
    ]


def _repeats(bench: Bench) -> Outcome:
    """Two plain trainings. Where they differ, no other can be compared."""
    if difference := bench.plain.difference(train(bench.device, bench.steps)):
        return failed(f"the device, without the library, comes to other numbers the second time: {difference}")
    losses = bench.plain.losses
    return passed(f"{bench.steps} steps twice: losses, gradients and weights are equal", loss=(losses[-1], ""))


def _offload(bench: Bench) -> Outcome:
    with _manager(bench) as manager:
        trained = train(bench.device, bench.steps, forward=manager.offload_context)
        moved = int(manager.stats()[_MOVED])
    return _compared(bench, trained, moved, "moved to the host and back")


def _auto(bench: Bench) -> Outcome:
    plain, refusals = bench.plain, []
    for share in _BUDGETS:
        before = bench.device.memory()[0]
        budget = before + plain.resident + int(share * (plain.peak - plain.resident))
        try:
            with _manager(bench, policy="auto", device_budget=budget) as manager:
                trained = train(bench.device, bench.steps, forward=manager.offload_context)
                moved = int(manager.stats()[_MOVED])
        except BudgetTooSmall as error:
            refusals.append(str(error).split(";")[0])
            continue
        figures = {
            "budget": (budget / 2**20, "MiB"),
            "peak": ((before + trained.peak) / 2**20, "MiB"),
            "plain_peak": ((before + plain.peak) / 2**20, "MiB"),
            "moved": (moved / 2**20, "MiB"),
        }
        took = f"{format_bytes(before + trained.peak)} of a budget of {format_bytes(budget)}"
        if difference := plain.difference(trained):
            return failed(difference, **figures)
        if before + trained.peak > budget:
            return failed(f"the numbers are right, but the last step took {took}", **figures)
        return passed(f"{bench.steps} steps are equal to the bit; the last one took {took}", **figures)
    return not_applicable(f"the model is too small for a budget here: {refusals[-1]}")


def _recompute(bench: Bench, how: How) -> Outcome:
    with _manager(bench) as manager:
        trained = train(
            bench.device, bench.steps, forward=lambda layers: manager.offload_context(layers, recompute=how)
        )
        moved = int(manager.stats()[_MOVED])
    return _compared(bench, trained, moved, "kept and moved; the rest was computed again")


def _spill(bench: Bench) -> Outcome:
    with _manager(bench, host_bytes=_LITTLE_HOST, disk=bench.files) as manager:
        trained = train(bench.device, bench.steps, forward=manager.offload_context)
        moved = int(manager.stats()["spilled.bytes.total"])
    return _compared(bench, trained, moved, "went on to the drive and came back")


def _optimizer(bench: Bench, residency: Residency) -> Outcome:
    with _manager(bench, disk=bench.files if residency == "disk" else None) as manager:
        register = partial(manager.register_optimizer, residency=residency, bucket_bytes="1MiB")
        trained = train(bench.device, bench.steps, optimizer=register)
    if difference := bench.plain.difference(trained):
        return failed(difference)
    return passed(f"{bench.steps} steps are equal to the bit")


def _phases(bench: Bench) -> Outcome:
    with _manager(bench) as manager:

        def away_and_back(model: torch.nn.Module, optimizer: Any) -> None:
            manager.offload(model)
            manager.offload(optimizer)
            manager.reload(model)
            manager.reload(optimizer)

        register = partial(manager.register_optimizer, residency="device-until-offload")
        trained = train(bench.device, bench.steps, optimizer=register, between=away_and_back)
    if difference := bench.plain.difference(trained):
        return failed(difference)
    return passed(f"model and optimizer left between {bench.steps} steps, which are equal to the bit")


def _without_drive(bench: Bench, code: str) -> Outcome:
    """Writing fails in the middle of a training, and stays so."""
    files = FailingFiles(bench.files, code, after=3)
    with _manager(bench, host_bytes=_LITTLE_HOST, disk=files) as manager:
        trained = train(bench.device, bench.steps, forward=manager.offload_context)
        failures = int(manager.stats()["disk.failures.total"])
    if failures == 0:
        return failed("no write failed, though they were made to")
    if difference := bench.plain.difference(trained):
        return failed(f"with {failures} failed writes {difference}")
    return passed(
        f"writing failed with {code}, and all {bench.steps} steps are equal to the bit", failures=(failures, "")
    )


@contextlib.contextmanager
def _manager(
    bench: Bench, *, disk: Files | None = None, host_bytes: str = _HOST, **options: Any
) -> Iterator[TieringManager]:
    """disk: the calls of a tier below the host; None is no such tier."""
    options = {"policy": LayerOrderPolicy()} | options
    with contextlib.ExitStack() as stack:
        if disk is not None:
            options["disk"] = stack.enter_context(
                contextlib.closing(DiskTier(bench.folder, capacity=_DISK, files=disk))
            )
        device = str(bench.device.torch_device)
        yield stack.enter_context(
            TieringManager(device=device, host_bytes=host_bytes, preallocate=False, **options)
        )


def _compared(bench: Bench, trained: Trained, moved: int, what: str) -> Outcome:
    if difference := bench.plain.difference(trained):
        return failed(difference, moved=(moved / 2**20, "MiB"))
    if moved == 0:
        return failed(f"nothing {what}, though the numbers are right")
    return passed(
        f"{bench.steps} steps are equal to the bit; {format_bytes(moved)} {what}", moved=(moved / 2**20, "MiB")
    )
