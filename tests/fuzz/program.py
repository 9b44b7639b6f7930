"""Random layered models: each layer is a small graph of operations, and they are called in some order."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.functions import FUNCTIONS, At, fit


class Boom(Exception):
    """What a layer raises when it is told to."""


class Around(Protocol):
    """What is done around each call of a layer: nothing, or what takes a context for each."""

    def layer(self, number: int) -> contextlib.AbstractContextManager[object]: ...

    def out(self, output: Tensor) -> Tensor: ...


class Nothing:
    """Around each call is nothing."""

    def layer(self, number: int) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def out(self, output: Tensor) -> Tensor:
        return output


@dataclass(frozen=True)
class Step:
    """One operation of a layer: its name, the values it takes by their numbers, and a number between 0 and 1."""

    name: str
    a: int
    b: int
    share: float


@dataclass(frozen=True)
class LayerPlan:
    """returns: "tensor", "tuple" or "dict". inner: the number of a layer before this one that runs inside it."""

    steps: tuple[Step, ...]
    returns: str
    inner: int | None
    tied: bool


@dataclass(frozen=True)
class Call:
    """One call of a layer. skip: which earlier output is its second input, if any, by name or by position.

    checkpoint: None, or whether it is a reentrant one. between: an operation that follows outside the layer.
    """

    layer: int
    skip: int | None
    named: bool
    checkpoint: bool | None
    autocast: bool
    between: bool
    matrix: bool


@dataclass(frozen=True)
class ProgramPlan:
    """All that a program is made of. A program with the same plan is the same to the last bit.

    quirks: for each layer None, or the reason for which it must not be computed again.
    """

    seed: int
    rows: int
    width: int
    layers: tuple[LayerPlan, ...]
    calls: tuple[Call, ...]
    autocast: bool
    integer_input: bool
    quirks: tuple[str | None, ...] = ()

    def cut(self, calls: int | None) -> ProgramPlan:
        """With so many calls at most."""
        return self if calls is None else replace(self, calls=self.calls[:calls])


# Each operation with weights: what makes its module of a width, and how it is applied to a matrix.
MODULES: dict[str, tuple[Callable[[int], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "linear": (lambda width: nn.Linear(width, width), lambda m, x: m(x)),
    "wide": (lambda width: nn.Linear(width, 2 * width, bias=False), lambda m, x: m(x)),
    "perceptron": (
        lambda width: nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
        lambda m, x: m(x),
    ),
    "layer_norm": (lambda width: nn.LayerNorm(width), lambda m, x: m(x)),
    "rms_norm": (lambda width: nn.RMSNorm(width), lambda m, x: m(x)),
    "batch_norm": (lambda width: nn.BatchNorm1d(width), lambda m, x: m(x)),
    "group_norm": (lambda width: nn.GroupNorm(2, width), lambda m, x: m(x)),
    "conv1d": (lambda width: nn.Conv1d(width, width, 3, padding=1), lambda m, x: m(x.t()[None])),
    "conv2d": (lambda width: nn.Conv2d(1, 2, 3, padding=1), lambda m, x: m(x[None, None])),
    "embedding": (
        lambda width: nn.Embedding(8, width),
        lambda m, x: m((x.detach() * 3).long().remainder(8)[:, 0]) * x,
    ),
    "bilinear": (lambda width: nn.Bilinear(width, width, 4), lambda m, x: m(x, x.tanh())),
    "prelu": (lambda width: nn.PReLU(width), lambda m, x: m(x)),
    "heads": (
        lambda width: nn.MultiheadAttention(width, 2, dropout=0.1),
        lambda m, x: m(x, x.tanh(), x, need_weights=False)[0],
    ),
}
SPECIAL = ("inner", "tied")
QUIRKS = ("buffer", "input", "generator", "python", "numpy", "checkpoint")


class Layer(nn.Module):
    """A random graph of operations over its inputs, which it adds to the first of them."""

    def __init__(self, plan: LayerPlan, at: At, inner: Layer | None, tied: nn.Linear, quirk: str | None) -> None:
        super().__init__()
        self._quirk = quirk
        self.generator = torch.Generator().manual_seed(0)
        if quirk == "buffer":
            self.register_buffer("seen", torch.ones(()))
        self._plan, self._at = plan, at
        self.fails = False
        self.inner = inner
        self.tied = tied if plan.tied else None
        self.parts = nn.ModuleList(
            MODULES[step.name][0](at.width) if step.name in MODULES else nn.Identity() for step in plan.steps
        )

    def forward(self, x: Tensor, skip: Tensor | None = None, matrix: Tensor | None = None) -> Any:
        at = self._at
        x = self._odd(x)
        values = [x, x * 0.5 if skip is None else skip]
        if matrix is not None:
            with torch.autocast(x.device.type, enabled=False):  # which would cast x alone
                values.append(torch.sparse.mm(matrix, x.float()))
        for number, (step, part) in enumerate(zip(self._plan.steps, self.parts, strict=True)):
            if self.fails and number == len(self._plan.steps) // 2:
                raise Boom("a layer was told to fail")
            value = self._do(step, part, values[step.a % len(values)], values[step.b % len(values)])
            # What grows without end would only take time.
            values.append(value if value.numel() <= 4 * at.size else fit(value, at))
        out = x + 0.5 * torch.tanh(fit(values[-1], at) + 0.3 * fit(values[-2], at))
        if self._plan.returns == "tensor":
            return out
        aside = fit(values[len(values) // 2], at).tanh()
        return (out, aside) if self._plan.returns == "tuple" else {"out": out, "aside": aside}

    def _odd(self, x: Tensor) -> Tensor:
        """The input, after what the layer does that it must not do twice."""
        match self._quirk:
            case "buffer":
                with torch.no_grad():
                    self.seen += 0.125
                return x * self.seen.clone()
            case "input":
                with torch.no_grad():
                    x.mul_(1.125)
            case "generator":
                return x * torch.rand(x.shape[-1:], generator=self.generator).to(x.device)
            case "python":
                return x * random.random()
            case "numpy":
                return x * float(numpy.random.random())
            case "checkpoint":
                return checkpoint(torch.tanh, x, use_reentrant=False)
        return x

    def _do(self, step: Step, part: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        at = self._at._replace(share=step.share)
        if step.name in MODULES:
            return MODULES[step.name][1](part, fit(a, at))
        if step.name == "inner":
            return fit(b, at) if self.inner is None else unpacked(self.inner(fit(a, at).sigmoid()))[0]
        if step.name == "tied":
            return fit(b, at) if self.tied is None else self.tied(fit(a, at))
        return FUNCTIONS[step.name](a, b, at)


def unpacked(result: Any) -> tuple[Tensor, Tensor | None]:
    """What a layer returned: its output, and what it gave beside that."""
    if isinstance(result, dict):
        return result["out"], result["aside"]
    return result if isinstance(result, tuple) else (result, None)


class State(NamedTuple):
    """What the layers of a program have changed by themselves so far."""

    buffers: list[Tensor]
    generators: list[Tensor]
    python: tuple[Any, ...]
    numpy: Any


class Program(nn.Module):
    """The model of a plan, with weights that are the same each time."""

    def __init__(self, plan: ProgramPlan, device: str) -> None:
        super().__init__()
        self.plan, self.device = plan, device
        self._at = At(plan.rows, plan.width, 0.5)
        torch.manual_seed(plan.seed)
        random.seed(plan.seed)
        numpy.random.seed(plan.seed)
        self.tied = nn.Linear(plan.width, plan.width)
        self.first = nn.Embedding(16, plan.width)
        made: list[Layer] = []
        for layer, quirk in zip(plan.layers, plan.quirks, strict=True):
            inner = None if layer.inner is None else made[layer.inner]
            made.append(Layer(layer, self._at, inner, self.tied, quirk))
        self.layers = nn.ModuleList(made)
        self.to(device)

    def input(self, number: int) -> Tensor:
        """A leaf that wants a gradient, or whole numbers; the same for each number."""
        generator = torch.Generator().manual_seed(self.plan.seed + number)
        if self.plan.integer_input:
            return torch.randint(16, (self.plan.rows,), generator=generator).to(self.device)
        x = torch.randn(self.plan.rows, self.plan.width, generator=generator)
        return x.to(self.device).requires_grad_()

    def state(self) -> State:
        """What its layers change by themselves: buffers, and where random numbers go on."""
        generators = [layer.generator.get_state() for layer in self.layers]
        buffers = [each.clone() for each in self.buffers()]
        return State(buffers, generators, random.getstate(), numpy.random.get_state())

    def restore(self, state: State) -> None:
        with torch.no_grad():
            for buffer, before in zip(self.buffers(), state.buffers, strict=True):
                buffer.copy_(before)
        for layer, before in zip(self.layers, state.generators, strict=True):
            layer.generator.set_state(before)
        random.setstate(state.python)
        numpy.random.set_state(state.numpy)

    def forward(self, x: Tensor, around: Around, fail_in: int | None = None) -> Tensor:
        """The loss. fail_in: the number of the call that raises Boom."""
        outputs = [x if x.is_floating_point() else self.first(x)]
        asides: list[Tensor] = []
        with self._autocast(self.plan.autocast):
            for number, call in enumerate(self.plan.calls):
                layer: Any = self.layers[call.layer]
                layer.fails = number == fail_in
                try:
                    with around.layer(number), self._autocast(call.autocast):
                        out, aside = unpacked(self._call(layer, call, outputs))
                finally:
                    layer.fails = False
                out = around.out(out)
                if aside is not None:
                    asides.append(aside)
                outputs.append((out * 1.1).tanh() if call.between else out)
            loss = outputs[-1].float().square().mean()
            return loss + sum((aside.float().mean() * 0.1 for aside in asides), torch.zeros_like(loss))

    def _call(self, layer: Layer, call: Call, outputs: list[Tensor]) -> Any:
        run: Any = layer
        # A checkpoint would have a layer change what was saved, in backward and behind autograd's back.
        if call.checkpoint is not None and self.plan.quirks[call.layer] != "input":
            run = partial(checkpoint, layer, use_reentrant=call.checkpoint)
        skip = None if call.skip is None else outputs[call.skip % len(outputs)]
        matrix = self._sparse() if call.matrix else None
        if call.named and not call.checkpoint:  # a reentrant checkpoint takes no named ones
            return run(outputs[-1], skip=skip, matrix=matrix)
        return run(outputs[-1], skip, matrix)

    def _sparse(self) -> Tensor:
        rows = torch.arange(self.plan.rows)
        where = torch.stack([rows, rows.roll(1)])
        values = torch.full((self.plan.rows,), 0.5)
        return torch.sparse_coo_tensor(where, values, (self.plan.rows, self.plan.rows)).to(self.device)

    def _autocast(self, enabled: bool) -> contextlib.AbstractContextManager[object]:
        return torch.autocast(self.device, dtype=torch.bfloat16) if enabled else contextlib.nullcontext()


def draw_program(rng: random.Random, *, leave_out: Set[str], reentrant: bool, sparse: bool) -> ProgramPlan:
    """A program drawn by `rng`. leave_out: operations that are not to be in it.

    reentrant, sparse: whether it may have checkpoints of that kind, and sparse matrices among its layers' inputs.
    """
    names = [name for name in (*FUNCTIONS, *MODULES, *SPECIAL) if name not in leave_out]
    layers: list[LayerPlan] = []
    for number in range(rng.randint(2, 8)):
        steps = tuple(
            Step(rng.choice(names), -rng.randint(1, 3), rng.randint(0, 9), rng.random())
            for _ in range(rng.randint(2, 9))
        )
        inner = rng.randrange(number) if number and rng.random() < 0.3 else None
        if inner is not None:
            steps = (*steps, Step("inner", -1, 0, 0.5))
        returns = rng.choices(("tensor", "tuple", "dict"), (4, 1, 1))[0]
        layers.append(LayerPlan(steps, returns, inner, rng.random() < 0.3))
    order = list(range(len(layers)))
    match rng.choices(("in order", "shuffled", "any"), (4, 1, 2))[0]:
        case "shuffled":
            rng.shuffle(order)
        case "any":
            order = [rng.choice(order) for _ in range(rng.randint(1, 10))]
    checkpoints, autocasts = rng.random() < 0.3, rng.random() < 0.2
    calls = []
    for place, layer in enumerate(order):
        call = _draw_call(rng, layer, place)
        # A reentrant checkpoint takes tensors in a dictionary for constants.
        kind = (call.checkpoint and reentrant and layers[layer].returns != "dict") if checkpoints else None
        calls.append(
            replace(call, checkpoint=kind, autocast=call.autocast and autocasts, matrix=call.matrix and sparse)
        )
    return ProgramPlan(
        seed=rng.randrange(1 << 30),
        rows=rng.choice((8, 16, 64, 128)),
        width=rng.choice((8, 16, 32)),
        layers=tuple(layers),
        calls=tuple(calls),
        autocast=rng.random() < 0.15,
        integer_input=rng.random() < 0.1,
    )


def _draw_call(rng: random.Random, layer: int, place: int) -> Call:
    return Call(
        layer,
        skip=rng.randint(0, place) if rng.random() < 0.4 else None,
        named=rng.random() < 0.3,
        checkpoint=rng.choice((None, False, True)),
        autocast=rng.random() < 0.5,
        between=rng.random() < 0.2,
        matrix=rng.random() < 0.1,
    )


def draw_quirks(rng: random.Random, layers: int) -> tuple[str | None, ...]:
    """For each layer the reason for which it must not be computed again. Most programs have none."""
    some = rng.random() < 0.3
    return tuple(rng.choice(QUIRKS) if some and rng.random() < 0.3 else None for _ in range(layers))
