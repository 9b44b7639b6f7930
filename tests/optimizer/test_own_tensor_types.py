"""States in tensor types of the optimizer's own, which know no more operators than a step and a checkpoint take."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conftest import KIND
from tests.optimizer.conftest import MakeTiered
from tests.optimizer.strange_optimizers import WithRate
from tests.optimizer.training import RESIDENCIES, give_gradients, make_params
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer

aten = torch.ops.aten
SHAPES = ((16, 8), (64,), (4, 4, 4))


class Codes(torch.Tensor):
    """Bytes and the values that they stand for, as torchao's low-bit states are. It does not know clone."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, values: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, values: torch.Tensor) -> None:
        self.codes, self.values_ = codes, values

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "values_"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], *context: Any) -> Any:
        return cls(parts["codes"], parts["values_"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        this = args[0]
        match func:
            case aten.detach.default:
                return cls(this.codes, this.values_.clone())
            case aten._to_copy.default:  # as torchao's: what is there already is no copy
                device = (kwargs or {}).get("device")
                return cls(this.codes.to(device=device), this.values_.to(device=device))
        raise NotImplementedError(f"Codes knows no {func}")

    def decoded(self) -> torch.Tensor:
        return self.values_[self.codes.long()]


class Coded(WithRate):
    """Momentum in bytes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    values = torch.linspace(-4, 4, 256).to(param.device)
                    state["mean"] = Codes(torch.full_like(param, 128, dtype=torch.uint8), values)
                mean = state["mean"].decoded().mul(0.9).add(param.grad)
                state["mean"].codes.copy_(mean.clamp(-4, 4).add(4).mul(31.875).round())
                param.sub_(mean, alpha=group["lr"])


Make = Callable[[], tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]]


def trained(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], *steps: int) -> list[torch.Tensor]:
    for step in steps:
        give_gradients(params, step, missing=False)
        optimizer.step()
    return [param.detach().cpu().clone() for param in params]


@pytest.fixture
def make(device: str, make_tiered: MakeTiered) -> Callable[..., Any]:
    """An optimizer and its parameters. tiered: the arguments of its registration, None for a plain one."""

    def made(tiered: dict[str, Any] | None) -> tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]:
        params = make_params(device, shapes=SHAPES)
        coded = Coded(params)
        return (coded if tiered is None else make_tiered(coded, **tiered)), params

    return made


TIERED = [{"residency": each, "separable": word} for each in RESIDENCIES for word in (None, True)]


@pytest.mark.parametrize("second", [None, *TIERED], ids=str)
@pytest.mark.parametrize("first", [None, *TIERED], ids=str)
def test_saved_in_a_file_and_resumed(
    first: dict[str, Any] | None, second: dict[str, Any] | None, make: Callable[..., Any]
) -> None:
    expected = trained(*make(None), 0, 1, 2, 3)
    optimizer, params = make(first)
    weights = trained(optimizer, params, 0, 1)
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    file.seek(0)
    resumed, others = make(second)
    trained(resumed, others, 7)
    with torch.no_grad():
        for param, weight in zip(others, weights, strict=True):
            param.copy_(weight)
    resumed.load_state_dict(torch.load(file, weights_only=False))
    assert all(map(torch.equal, trained(resumed, others, 2, 3), expected))


@pytest.mark.parametrize("device", dict.fromkeys((KIND, "cpu")))
def test_neither_a_snapshot_nor_what_was_loaded_is_the_optimizers_own(device: str, make_tiered: MakeTiered) -> None:
    params = make_params(device, shapes=SHAPES)
    optimizer = make_tiered(Coded(params), device=device)
    trained(optimizer, params, 0)
    saved = optimizer.state_dict()
    before = [state["mean"].codes.clone() for state in saved["state"].values()]
    optimizer.load_state_dict(saved)
    trained(optimizer, params, 1, 2)
    assert all(torch.equal(state["mean"].codes, codes) for state, codes in zip(saved["state"].values(), before))  # noqa: B905
    assert not torch.equal(optimizer.state_dict()["state"][0]["mean"].codes, before[0])


@pytest.mark.parametrize("given_back", [False, True])
def test_states_on_the_device_can_be_saved(given_back: bool, make: Callable[..., Any]) -> None:
    """Though those of several types came in one piece; and a file has the bytes of the states, and no others."""

    def saved(wrapped: torch.optim.Optimizer) -> dict[int, Any]:
        torch.save(wrapped.state_dict(), file := io.BytesIO())
        assert len(file.getvalue()) < 16 << 10
        file.seek(0)
        return dict(torch.load(file, weights_only=False)["state"])

    optimizer, params = make({})
    assert isinstance(optimizer, TieredOptimizer)
    trained(optimizer, params, 0, 1)
    expected = [state["mean"].codes for state in optimizer.state_dict()["state"].values()]
    if given_back:
        states = saved(optimizer.give_back())
    else:
        with optimizer.present() as wrapped:
            states = saved(wrapped)
    assert all(torch.equal(states[number]["mean"].codes.cpu(), codes) for number, codes in enumerate(expected))
