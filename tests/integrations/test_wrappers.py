"""peft's adapters, and optimizers of other makers: tiered as they are plain, or refused with what to type."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

pytest.importorskip("schedulefree", reason="make test-integrations installs it")

import peft
import schedulefree

from tests.integrations import tiny_llama
from tests.integrations.peak import peak_of
from tests.models import Stack
from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy

pytestmark = [
    pytest.mark.slow(why="trainings with frameworks that take seconds to import"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]

Params = list[torch.nn.Parameter]
Outcome = tuple[list[float], list[torch.Tensor]]
STEPS = 4


class EightBit(Optimizer):
    """Momentum in 8 bits, as bitsandbytes keeps it: bytes, to which a table that all share gives a meaning, in
    blocks with a largest value each.
    """

    BLOCK = 64

    def __init__(self, params: Params, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self._table = torch.linspace(-1, 1, 256)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_one(param, self.state[param], group["lr"])

    def _step_one(self, param: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        blocks = -(-param.numel() // self.BLOCK)
        if not state:
            state["step"] = 0
            state["qmap1"] = self._table = self._table.to(param.device)
            state["state1"] = torch.full((blocks, self.BLOCK), 128, dtype=torch.uint8, device=param.device)
            state["absmax1"] = torch.zeros(blocks, 1, device=param.device)
        state["step"] += 1
        momentum = state["qmap1"][state["state1"].long()] * state["absmax1"]
        flat = momentum.flatten()[: param.numel()]
        flat.mul_(0.9).add_(param.grad.flatten())  # type: ignore[union-attr]
        state["absmax1"].copy_(momentum.abs().amax(1, keepdim=True).clamp_min(1e-12))
        state["state1"].copy_((momentum / state["absmax1"]).add(1).mul(127.5).round())
        param.sub_(flat.view_as(param), alpha=lr)


class Lookahead(Optimizer):
    """Steps another one, and every second time goes half of the way back."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self._slow = [[param.detach().clone() for param in group["params"]] for group in inner.param_groups]
        self._steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self._steps += 1
        if self._steps % 2 == 0:
            for group, slow in zip(self.inner.param_groups, self._slow, strict=True):
                for param, old in zip(group["params"], slow, strict=True):
                    param.copy_(old.lerp_(param, 0.5))


def named(path: str, **options: Any) -> Callable[[Params], Optimizer]:
    module, name = path.rsplit(".", 1)
    return lambda params: getattr(import_module(module), name)(params, **options)  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, Callable[[Params], Any]] = {
    "schedulefree": named("schedulefree.AdamWScheduleFree", lr=0.01, warmup_steps=2),
    "lion": named("lion_pytorch.Lion", lr=1e-3),
    "transformers' adafactor": named("transformers.optimization.Adafactor"),
    "muon": lambda params: torch.optim.Muon([each for each in params if each.ndim == 2], lr=0.01),
    "8 bits": EightBit,
}


def train(
    device: str, make: Callable[[Params], Any], model: torch.nn.Module, inputs: Callable[[int], Any], tier: Any
) -> tuple[Outcome, int]:
    """The losses, the weights that train, and the peak of device memory.

    tier: registers the optimizer; None is a plain training.
    """
    params = [each for each in model.parameters() if each.requires_grad]
    optimizer: Any = make(params)
    manager = TieringManager(policy=LayerOrderPolicy(), device=device, host_bytes="256MiB")
    losses = []

    def steps() -> None:
        for number in range(STEPS):
            batch = inputs(number)
            output = model(**batch) if isinstance(batch, dict) else model(batch)
            loss = getattr(output, "loss", output)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    with manager:
        if tier is not None:
            manager.attach(model, min_bytes=1)
            optimizer = tier(manager, optimizer)
        if hasattr(optimizer, "train"):
            optimizer.train()
        _, peak = peak_of(steps, device)
        assert tier is None or int(manager.stats()["offloaded.blocks.total"]) > 0
        return (losses, [each.detach().cpu() for each in params]), peak


def rows(device: str) -> Callable[[int], torch.Tensor]:
    return lambda number: torch.randn(512, 64, generator=torch.Generator().manual_seed(number)).to(device)


def tokens(device: str) -> Callable[[int], dict[str, torch.Tensor]]:
    def batch(number: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (8, 64), generator=torch.Generator().manual_seed(number)).to(device)
        return {"input_ids": ids, "labels": ids}

    return batch


def register(manager: TieringManager, optimizer: Optimizer) -> Optimizer:
    return manager.register_optimizer(optimizer)


def assert_same_in_less(device: str, run: Callable[[Any], tuple[Outcome, int]], tier: Any = register) -> None:
    (losses, weights), plain = run(None)
    (others, tiered), peak = run(tier)
    assert losses == others
    assert all(torch.equal(one, other) for one, other in zip(weights, tiered, strict=True))
    assert device == "cpu" or peak < plain


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_another_maker(name: str, device: str) -> None:
    def run(tier: Any) -> tuple[Outcome, int]:
        torch.manual_seed(0)
        return train(device, OPTIMIZERS[name], Stack(4).to(device), rows(device), tier)

    assert_same_in_less(device, run)


def test_a_wrapper_is_refused_and_what_it_wraps_is_tiered(device: str) -> None:
    def inside(manager: TieringManager, optimizer: Any) -> Any:
        with pytest.raises(ValueError, match=r"Lookahead wraps another optimizer, .* register optimizer\.inner"):
            manager.register_optimizer(optimizer)
        optimizer.inner = manager.register_optimizer(optimizer.inner)
        return optimizer

    def run(tier: Any) -> tuple[Outcome, int]:
        torch.manual_seed(0)
        model = Stack(4).to(device)
        return train(device, lambda params: Lookahead(torch.optim.AdamW(params)), model, rows(device), tier)

    assert_same_in_less(device, run, inside)


def test_a_wrapper_that_is_no_optimizer_is_told_as_well(device: str) -> None:
    """This one cannot be put back around a tiered one, as it writes into the other's states."""
    wrapper = schedulefree.ScheduleFreeWrapper(torch.optim.SGD(Stack(2).to(device).parameters(), lr=0.1))
    refused = pytest.raises(ValueError, match="ScheduleFreeWrapper wraps another optimizer")
    with TieringManager(device=device, host_bytes="64MiB") as manager, refused:
        manager.register_optimizer(wrapper)


ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1),
    "dora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=4, use_dora=True),
    "ia3": lambda: peft.IA3Config(task_type="CAUSAL_LM"),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter(name: str, device: str) -> None:
    def run(tier: Any) -> tuple[Outcome, int]:
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_llama.model(use_cache=False), ADAPTERS[name]()).to(device).train()
        return train(device, lambda params: torch.optim.AdamW(params, lr=0.01), model, tokens(device), tier)

    assert_same_in_less(device, run)
