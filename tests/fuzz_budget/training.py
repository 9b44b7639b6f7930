"""Trains as a case says, with a manager or without."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.fuzz_budget.case import Case, StepPlan
from tests.fuzz_budget.models import FailsHere, Model
from tests.fuzz_budget.watched import Step, Watch
from tests.fuzz_budget.witness import Witness
from tiered_mem import TieringManager
from tiered_mem.policies.planning.report import Report

_LEAST_HOST = 4 << 20


@dataclass(frozen=True)
class Outcome:
    """What came of a training: its steps, all numbers, what ended it early, and what its report says.

    unreported: what report() raised. moved, left: bytes that went to the host, and that are allocated afterwards.
    """

    steps: tuple[Step, ...]
    numbers: tuple[Tensor, ...]
    error: Exception | None = None
    report: Report | None = None
    unreported: Exception | None = None
    moved: int = 0
    left: int = 0

    @property
    def peak(self) -> int:
        return max((step.peak for step in self.steps), default=0)


def train(case: Case, budget: int | None, host_bytes: int = 0) -> Outcome:
    """budget: of the manager; None is for no manager."""
    torch.npu.empty_cache()
    before = torch.npu.memory_allocated()
    with Witness() as witness, tempfile.TemporaryDirectory(prefix="tiered_mem_fuzz_") as folder:
        watch = Watch(witness)
        with watch.listening():
            found = _train(case, watch, budget, max(host_bytes, _LEAST_HOST), Path(folder))
    for generation in (
        0,
        2,
    ):  # cycles in torch or in a traceback; nearly always it is enough to look at the youngest
        gc.collect(generation)
        if (left := torch.npu.memory_allocated() - before) == 0:
            break
    return Outcome(tuple(watch.steps), *found, left=left)


def _train(case: Case, watch: Watch, budget: int | None, host_bytes: int, folder: Path) -> tuple[Any, ...]:
    """All of an outcome but its steps and what is left."""
    if budget is None:
        training = Training(case, watch, None)
        training.run()
        return (training.numbers(),)
    plan = case.manager
    disk = {"spill_dir": folder, "spill_bytes": "2GiB"} if plan.disk or case.optimizer.residency == "disk" else {}
    error = report = unreported = None
    numbers: tuple[Tensor, ...] = ()
    with TieringManager(
        policy="auto",
        device_budget=budget,
        slowdown=plan.slowdown,
        host_bytes=host_bytes,
        preallocate=False,
        **disk,  # type: ignore[arg-type]
    ) as manager:
        watch.blocks = partial(_blocks, weakref.ref(manager))
        try:
            training = Training(case, watch, manager)
            training.run()
            numbers = training.numbers()
        except Exception as raised:
            error = _without_frames(raised)
        try:
            report = manager.report()
            str(report), manager.memory_summary()
        except Exception as raised:
            unreported = _without_frames(raised)
        moved = int(manager.stats()["offloaded.bytes.total"])
    return numbers, error, report, unreported, moved


def _blocks(manager: weakref.ref[TieringManager]) -> int:
    """How many have left or stayed."""
    alive = manager()
    if alive is None:
        return 0
    stats = alive.stats()
    kinds = ("offloaded.blocks", "stayed.policy.tensors", "stayed.no_room.tensors")
    return int(sum(stats[f"{kind}.total"] for kind in kinds))


class Training:
    """One run of a case. manager: None trains without."""

    def __init__(self, case: Case, watch: Watch, manager: TieringManager | None) -> None:
        self._case, self._watch, self._manager = case, watch, manager
        torch.manual_seed(case.model.seed)
        self._model = self._make()
        self._optimizer = self._optimize(self._model)
        self._second = self._make() if case.second else None
        self._second_optimizer = self._optimize(self._second) if self._second and case.second == "gan" else None
        self._entered: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if manager is not None:
            self._enter(manager)
        self._losses: list[Tensor] = []
        self._ballast: Tensor | None = None

    def run(self) -> None:
        for number, step in enumerate(self._case.steps):
            torch.manual_seed(self._case.model.seed + number)
            with self._watch.step(_kind(self._case, number)):
                self._step(number, step)
        torch.npu.synchronize()

    def numbers(self) -> tuple[Tensor, ...]:
        """The losses and the weights in the end."""
        return (*(loss.cpu() for loss in self._losses), *(p.detach().cpu() for p in self._model.parameters()))

    def _make(self) -> Model:
        dtype = torch.bfloat16 if self._case.model.bfloat16 else torch.float32
        model = Model(self._case.model).to("npu", dtype)
        return model.eval() if self._case.manager.entry == "eval" else model

    def _optimize(self, model: Model) -> Any:
        plan = self._case.optimizer
        kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "sgd": torch.optim.SGD,
            "momentum": lambda parameters, **more: torch.optim.SGD(parameters, momentum=0.9, **more),
            "adam": torch.optim.Adam,
            "adamw": torch.optim.AdamW,
            "rmsprop": torch.optim.RMSprop,
            "adagrad": torch.optim.Adagrad,
        }
        optimizer = kinds[plan.name](model.parameters(), lr=1e-3, foreach=plan.foreach)
        if self._manager is None or plan.residency is None:
            return optimizer
        return self._manager.register_optimizer(
            optimizer,
            bucket_bytes=plan.bucket_bytes,
            residency=plan.residency,  # type: ignore[arg-type]
        )

    def _enter(self, manager: TieringManager) -> None:
        plan = self._case.manager
        least: dict[str, Any] = {} if plan.min_bytes is None else {"min_bytes": plan.min_bytes}
        least["recompute"] = plan.recompute
        if plan.entry == "context":
            context = manager.offload_context(self._model, **least)
            self._entered = lambda: context
        else:
            manager.attach(self._model, **least)
        if self._second_optimizer is not None and self._second is not None:
            manager.attach(self._second, **least)

    def _step(self, number: int, step: StepPlan) -> None:
        watch, case = self._watch, self._case
        if case.ballast is not None and case.ballast[0] == number:
            self._ballast = torch.zeros(case.ballast[1], dtype=torch.uint8, device="npu")
        if case.second == "teacher" and self._second is not None:
            with watch.part("evaluation"):
                self._evaluate(self._second, step.rows)
        if step.fails is not None:
            self._model.fails = step.fails
            with watch.part("training"), contextlib.suppress(FailsHere):
                self._gradients(self._model, step)
            self._model.fails = None
            self._optimizer.zero_grad()
        for _ in range(step.microbatches):
            with watch.part("training"):
                self._gradients(self._model, step)
        with watch.part("optimizer"):
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=not case.optimizer.keeps_gradients)
        if self._second_optimizer is not None and self._second is not None:
            with watch.part("training"):
                self._gradients(self._second, step)
            with watch.part("optimizer"):
                self._second_optimizer.step()
                self._second_optimizer.zero_grad()
        if step.evaluate:
            with watch.part("evaluation"):
                self._evaluate(self._model, step.evaluate)

    def _evaluate(self, model: Model, rows: float) -> None:
        training = model.training
        model.eval()
        with torch.no_grad():
            self._losses.append(model(self._batch(rows)))
        model.train(training)

    def _gradients(self, model: Model, step: StepPlan) -> None:
        """A forward and what is done with its graph, as the kind of step says."""
        x = self._batch(step.rows).requires_grad_(step.kind == "penalty")
        forward = model.loss if self._case.manager.entry == "method" else model
        with self._entered():
            loss = forward(x)
            other = forward(self._batch(step.rows)) if step.kind == "two" else None
        match step.kind:
            case "retain":
                loss.backward(retain_graph=True)
                loss.backward()
            case "penalty":
                (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
                (loss + gradient.float().pow(2).sum()).backward()
            case "two":
                (loss - other).backward()
            case _:
                loss.backward()
        self._losses.append(loss.detach())

    def _batch(self, rows: float) -> Tensor:
        """Made on the device: a copy from the host would take its time."""
        plan = self._case.model
        count = max(1, int(rows * plan.rows)) * plan.width
        dtype = torch.bfloat16 if plan.bfloat16 else torch.float32
        return torch.arange(count, dtype=dtype, device="npu").mul_(1 / count).view(-1, plan.width)


def _without_frames(error: Exception) -> Exception:
    """Its frames, and those of the errors before it, would keep the training's tensors."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__context__
    return error


def _kind(case: Case, number: int) -> str:
    """What a step does, in a word that is the same for steps that do the same with as many rows."""
    step = case.steps[number]
    words = [step.kind, *(["ballast"] if case.ballast and case.ballast[0] <= number else [])]
    words += ["evaluation"] if step.evaluate else []
    words += ["failure"] if step.fails is not None else []
    words += [case.second] if case.second else []
    words += [] if case.manager.entry == "attach" else [f"by {case.manager.entry}"]
    return f"{' '.join(words)} x{step.rows:.2f}"
