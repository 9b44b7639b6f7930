"""The optimizers that the fuzz draws from, and what each of them can be used for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from tests.optimizer import strange_optimizers as strange

Groups = list[dict[str, Any]]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLOAT32 = (torch.float32,)


@dataclass(frozen=True)
class Kind:
    """One optimizer.

    options: draws those of its constructor. group_options: those that groups may have of their own.
    separable: what may be said of it at registration. closure: it needs one. matrices: it takes those alone.
    sparse: its gradients are. full: all parameters have gradients, in all steps. groups: it takes several, and more
    later. scaler: it may be used with a gradient scaler. poison: gradients may be NaN or infinite.
    loads: it is the same after a load of what it saved. draws: random numbers, in each step.
    """

    make: Callable[..., Optimizer]
    options: Callable[[random.Random], dict[str, Any]] = lambda rng: {}
    group_options: tuple[str, ...] = ("lr",)
    separable: tuple[bool | None, ...] = (None, None, True, False)
    dtypes: tuple[torch.dtype, ...] = FLOATS
    closure: bool = False
    matrices: bool = False
    sparse: bool = False
    full: bool = False
    groups: bool = True
    scaler: bool = True
    poison: bool = True
    loads: bool = True
    draws: bool = False


def _adam(rng: random.Random) -> dict[str, Any]:
    return {
        "lr": rng.choice([1e-3, 0.1]),
        "amsgrad": rng.random() < 0.4,
        "maximize": rng.random() < 0.2,
        "weight_decay": rng.choice([0.0, 0.1]),
        **_implementation(rng),
    }


def _implementation(rng: random.Random) -> dict[str, Any]:
    return rng.choice([{}, {"foreach": True}, {"foreach": False}])


def _plain(rng: random.Random) -> dict[str, Any]:
    return {"lr": rng.choice([1e-3, 0.1]), "weight_decay": rng.choice([0.0, 0.1]), **_implementation(rng)}


def _sgd(rng: random.Random) -> dict[str, Any]:
    momentum = rng.choice([0.0, 0.9])
    return {**_plain(rng), "momentum": momentum, "nesterov": momentum > 0 and rng.random() < 0.5}


def _rms(rng: random.Random) -> dict[str, Any]:
    return {**_plain(rng), "momentum": rng.choice([0.0, 0.9]), "centered": rng.random() < 0.5}


def _lbfgs(rng: random.Random) -> dict[str, Any]:
    return {
        "lr": 0.1,
        "max_iter": rng.randint(1, 4),
        "history_size": rng.randint(1, 5),
        "line_search_fn": rng.choice([None, "strong_wolfe"]),
    }


def _rate(rng: random.Random) -> dict[str, Any]:
    return {"lr": rng.choice([1e-3, 0.1])}


_DECAYED = ("lr", "weight_decay")
_AT_ONCE: dict[str, Any] = {"separable": (None, None, False)}

KINDS: dict[str, Kind] = {
    "adam": Kind(torch.optim.Adam, _adam, _DECAYED),
    "adamw": Kind(torch.optim.AdamW, _adam, _DECAYED),
    "adamw fused": Kind(lambda p, **o: torch.optim.AdamW(p, fused=True, **o), _rate, _DECAYED, scaler=False),
    "sgd": Kind(torch.optim.SGD, _sgd, ("lr", "momentum")),
    "adagrad": Kind(torch.optim.Adagrad, _plain, _DECAYED),
    "adadelta": Kind(torch.optim.Adadelta, _plain, _DECAYED),
    "adamax": Kind(torch.optim.Adamax, _plain, _DECAYED),
    "asgd": Kind(torch.optim.ASGD, _plain, _DECAYED),
    "nadam": Kind(torch.optim.NAdam, _plain, _DECAYED),
    "radam": Kind(torch.optim.RAdam, _plain, _DECAYED),
    "rprop": Kind(torch.optim.Rprop, lambda rng: {"lr": 0.01, **_implementation(rng)}),
    "rmsprop": Kind(torch.optim.RMSprop, _rms, _DECAYED),
    "adafactor": Kind(torch.optim.Adafactor, _plain, _DECAYED),
    "muon": Kind(torch.optim.Muon, _rate, ("lr",), matrices=True, dtypes=FLOAT32),
    "sparse adam": Kind(torch.optim.SparseAdam, _rate, matrices=True, sparse=True, dtypes=FLOAT32, scaler=False),
    "lbfgs": Kind(
        torch.optim.LBFGS,
        _lbfgs,
        dtypes=FLOAT32,
        closure=True,
        groups=False,
        scaler=False,
        poison=False,
        **_AT_ONCE,
    ),
    "master weights": Kind(strange.MasterWeights, _rate),
    "out of place": Kind(strange.OutOfPlace, _rate, poison=False),
    "growing": Kind(strange.Growing, _rate),
    "noisy": Kind(strange.Noisy, _rate, draws=True),
    "langevin": Kind(strange.Langevin, _rate, draws=True),
    "schedule free": Kind(strange.ScheduleFree, _rate),
    "global norm": Kind(strange.GlobalNorm, _rate, dtypes=FLOAT32, full=True, **_AT_ONCE),
    "estimates": Kind(strange.Estimates, _rate, poison=False, **_AT_ONCE),
    "decaying": Kind(strange.Decaying, _rate, **_AT_ONCE),
    "clipped": Kind(strange.Clipped, _adam, _DECAYED, **_AT_ONCE),
    "skipping": Kind(strange.Skipping, _sgd, **_AT_ONCE),
    "sharp": Kind(strange.Sharp, _sgd, closure=True, scaler=False, **_AT_ONCE),
    "flat": Kind(strange.Flat, _rate, dtypes=FLOAT32, full=True, groups=False, loads=False, **_AT_ONCE),
}
