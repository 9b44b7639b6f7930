"""Optimizers, where their states may be, and a training of a few small parameters with made-up gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

Params = Sequence[torch.nn.Parameter]
SHAPES = ((8, 6), (6,), (16, 3), (), (5, 7))


def _matrices(params: Params) -> list[torch.nn.Parameter]:
    return [param for param in params if param.ndim == 2]


OPTIMIZERS: dict[str, Callable[[Params], Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, foreach=False),
    "adam-foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd-nesterov-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop-centered": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "muon": lambda p: torch.optim.Muon(_matrices(p)),
}

RESIDENCIES = ("disk", "host", "device-until-offload")


class Place(NamedTuple):
    """Where states are when they are saved or loaded."""

    residency: str
    offloaded: bool = False

    def __str__(self) -> str:
        return f"{self.residency}{', offloaded' if self.offloaded else ''}"


PLACES = [*map(Place, RESIDENCIES), Place("device-until-offload", offloaded=True)]


def make_params(
    device: str, dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[torch.nn.Parameter]:
    """The same ones each time."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(device)) for shape in shapes]


def give_gradients(params: Params, step: int, *, missing: bool = True) -> None:
    """Those of a step. missing: some have none, others in each step."""
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(100 * step + index)
        gradient = torch.randn(param.shape, generator=generator)
        param.grad = None if missing and (step + index) % 4 == 0 else gradient.to(param.dtype).to(param.device)


def train(optimizer: Optimizer, params: Params, steps: Sequence[int], *, missing: bool = True) -> None:
    """Steps with gradients of their own and a learning rate that changes."""
    for step in steps:
        give_gradients(params, step, missing=missing)
        for group in optimizer.param_groups:
            group["lr"] *= 0.97
        optimizer.step()
    optimizer.zero_grad()


def backward(params: Params, step: int, *, missing: Callable[[int, int], bool] = lambda step, index: False) -> None:
    """Gradients of a step that autograd adds. The last parameter gets its own first, as in a model.

    missing: whether a parameter, by the step and its number, has no part in it.
    """
    total: Any = None
    for index, param in enumerate(params):
        if missing(step, index) or not param.requires_grad:
            continue
        generator = torch.Generator().manual_seed(100 * step + index)
        weights = torch.randn(param.shape, generator=generator).to(param.dtype).to(param.device)
        part = (param * weights).sin().sum()
        total = part if total is None else total * 0.5 + part  # one after another
    if total is not None:
        total.backward()


def train_by_backward(
    optimizer: Optimizer,
    params: Params,
    steps: Sequence[int],
    *,
    missing: Callable[[int, int], bool] = lambda step, index: False,
) -> None:
    """Steps with gradients of autograd's, and a learning rate that changes."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] *= 0.97
        backward(params, step, missing=missing)
        optimizer.step()
        optimizer.zero_grad()


class Outcome(NamedTuple):
    """Parameters and states, on the CPU."""

    params: list[torch.Tensor]
    state_dict: dict[str, Any]


def outcome(optimizer: Optimizer, params: Params) -> Outcome:
    return Outcome([param.detach().cpu() for param in params], on_cpu(optimizer.state_dict()))


def differences(one: Outcome, other: Outcome) -> list[str]:
    """Where two outcomes are not the same, bit by bit; shapes, types and keys too."""
    return list(_differ("params", one.params, other.params)) + list(
        _differ("state_dict", one.state_dict, other.state_dict)
    )


def on_cpu(thing: Any) -> Any:
    """A copy in which all tensors are copies on the CPU."""
    if isinstance(thing, torch.Tensor):
        return thing.detach().cpu().clone()
    if isinstance(thing, dict):
        return {key: on_cpu(value) for key, value in thing.items()}
    return [on_cpu(value) for value in thing] if isinstance(thing, list) else thing


def _differ(name: str, one: Any, other: Any) -> Iterator[str]:
    if type(one) is not type(other):
        yield f"{name}: {type(one)} and {type(other)}"
    elif isinstance(one, torch.Tensor):
        alike = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        if not alike or not torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
            yield f"{name}: {one} and {other}"
    elif isinstance(one, dict):
        if one.keys() != other.keys():  # in which order states came to be is of no matter
            yield f"{name}: {list(one)} and {list(other)}"
        for key in one.keys() & other.keys():
            yield from _differ(f"{name}[{key!r}]", one[key], other[key])
    elif isinstance(one, list | tuple):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from _differ(f"{name}[{index}]", *pair)
    elif one != other:
        yield f"{name}: {one} and {other}"
