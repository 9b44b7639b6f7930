"""One case of the fuzz: parameters, an optimizer, and what is done with it, with and without tiering."""

from __future__ import annotations

import gc
import random
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ascend_emulator
import torch
from ascend_emulator.errors import EmulatorError

from tests.optimizer.fuzz_kinds import KINDS, Kind
from tests.optimizer.training import RESIDENCIES, differences, on_cpu, outcome
from tests.spill.declared_files import DeclaredFiles
from tiered_mem import TieringManager
from tiered_mem.errors import InterruptedStep
from tiered_mem.optimizer.registered import Overlap
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer
from tiered_mem.spill.disk_tier import DiskTier

OVERLAPS: tuple[Overlap, ...] = (
    "backward",
    "forward",
)


class Finding(Exception):
    """Something that is not as without tiering, or that is left over."""


@dataclass
class Param:
    """shape: a transposed one has it backwards in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    frozen: bool = False
    transposed: bool = False
    on_cpu: bool = False


@dataclass
class Case:
    """All that is drawn. groups: the numbers of parameters, and options.

    overlap: where there is one, nobody looks at gradients between backward and step. keep_gradients: is asked for
    with it. backwards: of each step; None is one or more, of which the last is announced.
    """

    kind: str
    options: dict[str, Any]
    params: list[Param]
    groups: list[tuple[list[int], dict[str, Any]]]
    residency: str
    bucket_bytes: int
    separable: bool | None
    register_at: int
    seed: int
    overlap: Overlap | None = None
    keep_gradients: bool = False
    backwards: int | None = 1
    actions: list[tuple[str, Any]] = field(default_factory=list)


def draw(rng: random.Random, device: str) -> Case:
    """A case that torch itself takes."""
    names = [name for name, kind in KINDS.items() if device == "cpu" or not kind.sparse]
    name = rng.choice(names)
    kind = KINDS[name]
    dtypes = [rng.choice(kind.dtypes)] if rng.random() < 0.7 else kind.dtypes
    params = [_draw_param(rng, kind, dtypes, device) for _ in range(rng.randint(1, 8))]
    numbers = list(range(len(params)))
    groups = []
    while numbers:
        size = len(numbers) if not kind.groups else rng.randint(1, len(numbers))
        options = {key: rng.choice([0.01, 0.3]) for key in kind.group_options if rng.random() < 0.4}
        groups.append((numbers[:size], options if kind.groups else {}))
        numbers = numbers[size:]
    case = Case(
        name,
        kind.options(rng),
        params,
        groups,
        rng.choice(RESIDENCIES),
        rng.choice([1, 512, 4096, 16384, 1 << 20]),
        rng.choice(kind.separable),
        register_at=rng.choice([0, 0, 0, 2]),
        seed=rng.randrange(1 << 30),
    )
    if not (kind.closure or kind.sparse) and rng.random() < 0.5:
        case.overlap = rng.choice(OVERLAPS)
        case.keep_gradients = case.overlap == "backward" and rng.random() < 0.3
        case.backwards = rng.choice([1, 1, 2, None, None])
    single = {(param.dtype, param.on_cpu) for param in params} == {(torch.float32, False)}
    actions = ["step"] * 6 + ["offload", "reload", "read", "freeze", "present"]
    if case.overlap is None or case.backwards != 1:  # or a part of the step is made in the only backward
        actions.append("close_over")
    if kind.loads:
        actions += ["state_dict", "renew"]
    if kind.groups:
        actions += ["add_group", "append"]
    if kind.scaler and not kind.closure and single and not kind.sparse and case.overlap is None:
        actions += ["scaled"] * 2
    if device == "cpu" and name in ("adam", "adamw"):
        actions.append("refused")
    case.actions = [(rng.choice(actions), rng.randrange(1 << 30)) for _ in range(rng.randint(3, 14))]
    return case


def _draw_param(rng: random.Random, kind: Kind, dtypes: Any, device: str) -> Param:
    ndim = 2 if kind.matrices else rng.choice([0, 1, 1, 2, 2, 3, 4])
    largest = (0, 60, 40, 12, 6)[ndim]
    smallest = 1 if kind.matrices or kind.full or rng.random() < 0.93 else 0
    return Param(
        tuple(rng.randint(smallest, largest) for _ in range(ndim)),
        rng.choice(dtypes),
        frozen=not kind.full and rng.random() < 0.1,
        transposed=not kind.matrices and rng.random() < 0.1,
        on_cpu=device != "cpu" and kind.groups and not kind.full and rng.random() < 0.03,
    )


class Training:
    """What is done in one case, with a tiered optimizer or a plain one. manager: None for a plain one."""

    def __init__(self, case: Case, device: str, manager: TieringManager | None) -> None:
        self._case = case
        self._kind = KINDS[case.kind]
        self._device = device
        self._manager = manager
        self.told: list[Any] = []  # to be compared
        self.params = [self._make(param, case.seed + number) for number, param in enumerate(case.params)]
        torch.manual_seed(case.seed)
        groups = [{"params": [self.params[n] for n in numbers], **o} for numbers, o in case.groups]
        self.optimizer: Any = self._kind.make(groups, **case.options)
        self._scaler = torch.amp.GradScaler(device, init_scale=1024.0)
        self._knows_the_word = False
        for number in range(case.register_at):
            self.step(case.seed + number)
        self._register()

    def run(self) -> None:
        for name, seed in self._case.actions:
            getattr(self, name)(seed)
        self.step(self._case.seed)
        self.tell()
        self.told.append(torch.rand(2).tolist())

    def tell(self) -> None:
        """Notes all that is to be the same."""
        self.told.append(outcome(self.optimizer, self.params))

    # What is done, with random numbers of its own.

    def step(self, seed: int, *, scaled: bool = False) -> None:
        rng = random.Random(seed)
        for group in self.optimizer.param_groups:
            group["lr"] *= rng.choice([0.9, 1.0, 1.1])
        poison = self._kind.poison and rng.random() < 0.05
        if self._case.overlap is not None:
            self._overlapped_step(seed, rng, poison=poison)
            return
        calls = 0

        def closure() -> torch.Tensor:
            nonlocal calls
            calls += 1
            self.optimizer.zero_grad()
            return self._backward(seed, again=calls)

        if self._kind.closure or (not scaled and not self._kind.sparse and rng.random() < 0.2):
            loss = self.optimizer.step(closure)
            self.told.append((calls, None if loss is None else float(loss)))
            return
        self._give_gradients(seed, poison=poison, scaled=scaled)
        if scaled:
            self._scaler.step(self.optimizer)
            self._scaler.update()
            self.told.append(self._scaler.get_scale())
        else:
            self.optimizer.step()
        if rng.random() < 0.5:
            self.optimizer.zero_grad()

    def _overlapped_step(self, seed: int, rng: random.Random, *, poison: bool) -> None:
        """Nobody looks at gradients, nor leaves any for the next step that may have been freed."""
        case = self._case
        backwards = case.backwards or rng.randint(1, 3)
        if rng.random() < 0.1:
            self._give_gradients(seed, poison=poison, scaled=False)  # which no hook sees
        else:
            for number in range(backwards):
                last = number == backwards - 1
                if case.backwards is None and last and (rng.random() < 0.9 or not self._knows_the_word):
                    self._announce()  # else all is left to step()
                # With a set number all gradients come that often, or one would look final before it is.
                self._backward(seed if case.backwards else seed + number, again=number + 1, poison=poison and last)
        self.optimizer.step()
        if not case.keep_gradients or rng.random() < 0.5:
            self.optimizer.zero_grad(not case.keep_gradients or rng.random() < 0.5)

    def _announce(self) -> None:
        self._knows_the_word = True  # before that, an only backward would be taken for the rule
        if isinstance(self.optimizer, TieredOptimizer):
            self.optimizer.last_backward()

    def scaled(self, seed: int) -> None:
        self.step(seed, scaled=True)

    def state_dict(self, seed: int) -> None:
        saved = on_cpu(self.optimizer.state_dict())  # torch's own is no snapshot
        self.tell()
        if seed % 2:
            self.step(seed)
        self.optimizer.load_state_dict(saved)

    def renew(self, seed: int) -> None:
        """Another optimizer goes on, from what this one saved."""
        saved = on_cpu(self.optimizer.state_dict())
        groups = [{**group, "params": list(group["params"])} for group in self.optimizer.param_groups]
        self.optimizer = self._kind.make(groups, **self._case.options)
        if seed % 2:
            self.step(seed)
        self._register()
        self.optimizer.load_state_dict(saved)

    def offload(self, seed: int) -> None:
        if self._manager is not None:
            self._manager.offload(self.optimizer)

    def reload(self, seed: int) -> None:
        if self._manager is not None:
            self._manager.reload(self.optimizer)

    def read(self, seed: int) -> None:
        state = self.optimizer.state
        param = self.params[seed % len(self.params)]
        if param in state and isinstance(state[param], dict):
            values = [value for value in state[param].values() if isinstance(value, torch.Tensor)]
            self.told.append([value.detach().cpu().clone() for value in values])

    def freeze(self, seed: int) -> None:
        if self._kind.full:
            return
        param = self.params[seed % len(self.params)]
        param.requires_grad_(not param.requires_grad)
        param.grad = None

    def present(self, seed: int) -> None:
        if self._manager is None:
            if self._case.kind == "schedule free":
                self.optimizer.switch(seed % 2 == 0)
            return
        with self.optimizer.present() as wrapped:
            if self._case.kind == "schedule free":
                wrapped.switch(seed % 2 == 0)

    def close_over(self, seed: int) -> None:
        """Backward gives gradients for which no step comes."""
        if not self._kind.sparse:
            self._backward(seed)
            self.optimizer.zero_grad()

    def add_group(self, seed: int) -> None:
        self.optimizer.add_param_group({"params": [self._another(seed)], "lr": 0.2})

    def append(self, seed: int) -> None:
        groups = self.optimizer.param_groups
        groups[seed % len(groups)]["params"].append(self._another(seed))

    def refused(self, seed: int) -> None:
        """A gradient that the optimizer does not take, alone."""
        param = next((p for p in self.params if p.requires_grad and p.ndim == 2 and p.numel()), None)
        if param is None:
            return
        self.optimizer.zero_grad()
        param.grad = torch.ones_like(param, memory_format=torch.contiguous_format).to_sparse(1)
        try:
            self.optimizer.step()
        except RuntimeError as error:
            self.told.append(str(error))
        param.grad = None

    def _another(self, seed: int) -> torch.nn.Parameter:
        rng = random.Random(seed)
        self.params.append(self._make(_draw_param(rng, self._kind, self._kind.dtypes[:1], "cpu"), seed))
        return self.params[-1]

    def _register(self) -> None:
        self._knows_the_word = False
        if self._manager is None:
            return
        register = partial(
            self._manager.register_optimizer,
            self.optimizer,
            bucket_bytes=self._case.bucket_bytes,
            residency=self._case.residency,
        )
        overlap, separable, refused = self._case.overlap, self._case.separable, ""
        while True:
            keep = overlap is not None and self._case.keep_gradients
            try:
                self.optimizer = register(separable=separable, overlap=overlap, keep_gradients=keep)
                break
            except ValueError as error:
                if overlap is not None and f"overlap={overlap!r}" in str(error):
                    overlap, refused = None, str(error)
                elif separable and len({(p.dtype, p.device) for p in self.params}) > 1:
                    # A group with several types, or on several devices, may not be what was said of it.
                    separable = None
                else:
                    raise
        if refused and not (self.optimizer.at_once or self._kind.draws):
            raise Finding(f"it is not stepped at once, and was refused: {refused}")

    def _make(self, param: Param, seed: int) -> torch.nn.Parameter:
        shape = param.shape[::-1] if param.transposed else param.shape
        value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(param.dtype)
        value = value.to("cpu" if param.on_cpu else self._device)
        value = value.permute(tuple(range(value.ndim - 1, -1, -1))) if param.transposed else value
        return torch.nn.Parameter(value, requires_grad=not param.frozen)

    def _gradients(self, seed: int) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor | None]]:
        rng = random.Random(seed)
        size = rng.choice([1e-6, 0.1, 1.0, 1.0, 100.0])
        for number, param in enumerate(self.params):
            missing = not param.requires_grad or (not self._kind.full and rng.random() < 0.15)
            generator = torch.Generator().manual_seed(seed + number)
            value = torch.randn(param.shape, generator=generator).mul_(size)
            yield param, None if missing else value.to(param.dtype).to(param.device)

    def _give_gradients(self, seed: int, *, poison: bool, scaled: bool) -> None:
        if scaled:
            self.optimizer.zero_grad()
            self._scaler.scale(self._loss(seed)).backward()
        else:
            for param, gradient in self._gradients(seed):
                sparse = self._kind.sparse and gradient is not None
                param.grad = gradient.to_sparse(1) if sparse and gradient is not None else gradient
        if poison:
            _poison(seed, [param.grad for param in self.params if param.grad is not None])

    def _backward(self, seed: int, again: int = 1, *, poison: bool = False) -> torch.Tensor:
        loss = self._loss(seed, again, poison=poison)
        loss.backward()
        return loss.detach()

    def _loss(self, seed: int, again: int = 1, *, poison: bool = False) -> torch.Tensor:
        loss = torch.zeros((), device=self._device, requires_grad=True) * 1.0
        gradients = list(self._gradients(seed))
        if poison:
            _poison(seed, [gradient for _, gradient in gradients if gradient is not None])
        for param, gradient in gradients:
            if gradient is not None:
                part = (param.float() * gradient.float() + 0.1 * again * param.float().square()).sum()
                loss = loss + part.to(self._device)
        return loss


def _poison(seed: int, gradients: list[torch.Tensor]) -> None:
    """One of them is not finite."""
    dense = [gradient for gradient in gradients if gradient.numel() and not gradient.is_sparse]
    if dense:
        dense[seed % len(dense)].view(-1)[0] = torch.inf if seed % 2 else torch.nan


def check(case: Case, device: str) -> None:
    """Raises Finding where a tiered optimizer is not as a plain one, or leaves anything behind."""
    plain = None
    try:
        plain = Training(case, device, None)
        plain.run()
    except Exception as error:
        _check_refused(case, device, plain, error)
        return
    with _manager(case, device) as manager:
        tiered = Training(case, device, manager)
        tiered.run()
        _compare(plain.told, tiered.told)
        gone = weakref.ref(tiered.optimizer)
        if not isinstance(tiered.optimizer, TieredOptimizer):
            raise Finding("it is not tiered")
        del tiered
        gc.collect()
        if gone() is not None:
            raise Finding("the tiered optimizer is kept alive")
        manager.synchronize()
        if used := manager.stats()["host.used.current"]:
            raise Finding(f"{used} bytes of host memory are left of an optimizer that is gone")


def _check_refused(case: Case, device: str, plain: Training | None, expected: Exception) -> None:
    """What torch itself does not take is refused with tiering as well, and until then it is the same."""
    tiered = None
    with _manager(case, device) as manager:
        try:
            tiered = Training(case, device, manager)
            tiered.run()
        except Exception as error:
            # In the middle of a step that error is the cause.
            said = error.__cause__ if isinstance(error, InterruptedStep) else error
            if not isinstance(said, type(expected)):
                raise Finding(f"without tiering it ends with {expected!r}, and with it with {error!r}") from error
            if plain is not None and tiered is not None:
                _compare(plain.told, tiered.told)
            return
        finally:
            del tiered
    raise Finding(f"without tiering it ends with {expected!r}, and with it it does not")


def _compare(plain: list[Any], tiered: list[Any]) -> None:
    if len(plain) != len(tiered):
        raise Finding(f"{len(plain)} things to compare without tiering, and {len(tiered)} with it")
    for number, (one, other) in enumerate(zip(plain, tiered, strict=True)):
        if hasattr(one, "params"):
            if found := differences(one, other):
                raise Finding(f"at {number}: " + "; ".join(each[:300] for each in found[:4]))
        elif isinstance(one, list) and one and isinstance(one[0], torch.Tensor):
            same = [torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True)]
            if not all(same):
                raise Finding(f"at {number}: states that were read differ")
        elif repr(one) != repr(other):  # NaN is the same as NaN here
            raise Finding(f"at {number}: {one} and {other}")


@contextmanager
def _manager(case: Case, device: str) -> Iterator[TieringManager]:
    """One of which nothing may be left at the end."""
    with tempfile.TemporaryDirectory() as folder:
        disk = None
        if case.residency == "disk":
            disk = DiskTier(Path(folder), capacity=64 << 20, files=DeclaredFiles())
        manager = TieringManager(policy="lru", device=device, host_bytes="64MiB", disk=disk)
        try:
            yield manager
        finally:
            manager.close()
        stats = manager.stats()
        left = list(Path(folder).iterdir())
        if stats["host.slots"] or stats["host.used.current"] or left:
            raise Finding(f"{stats['host.slots']} slots of host memory are left, and the files {left}")
        if device == "npu" and (races := _races()):
            ascend_emulator.clear_races()
            raise Finding(f"races: {races[0]}")


def _races() -> list[ascend_emulator.Race]:
    try:
        return ascend_emulator.races()
    except EmulatorError:
        return []  # the detector is off
