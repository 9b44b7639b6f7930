"""accelerate and a loop of one's own: an optimizer registered before or after `prepare`, and peft's LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

accelerate = pytest.importorskip("accelerate", reason="make test-integrations installs it")

from tests.integrations.peak import peak_of  # noqa: E402
from tests.models import Stack  # noqa: E402
from tiered_mem import TieringManager  # noqa: E402
from tiered_mem.policies import LayerOrderPolicy  # noqa: E402

pytestmark = [
    pytest.mark.slow(why="trainings of a framework that takes seconds to import"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]

When = Literal["before", "after"]


class Loop:
    """A training of six steps, the same each time. registered: before or after `prepare`; None is plain."""

    def __init__(self, device: str, registered: When | None) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
        self.manager = TieringManager(policy=LayerOrderPolicy(), device=device, host_bytes="64MiB")
        model: Any = Stack(4)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        if registered == "before":
            model.to(device)
            optimizer = self.manager.register_optimizer(optimizer)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if registered == "after":
            self.optimizer.optimizer = self.manager.register_optimizer(self.optimizer.optimizer)
        if registered is not None:
            self.manager.attach(self.model, min_bytes=1)

    def step(self, number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(512, 64, generator=generator).to(self.accelerator.device)
        with self.accelerator.accumulate(self.model):
            loss = self.model(x)
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss.detach())

    def steps(self) -> tuple[list[float], list[torch.Tensor]]:
        """The losses of six of them, and the weights after these."""
        return [self.step(number) for number in range(6)], [each.cpu() for each in self.model.parameters()]


@pytest.mark.parametrize("registered", ["before", "after"])
def test_losses_are_those_of_the_plain_loop(device: str, registered: When) -> None:
    (losses, weights), plain = peak_of(Loop(device, None).steps, device)
    tiered = Loop(device, registered)
    (others, moved), peak = peak_of(tiered.steps, device)
    assert losses == others
    assert all(torch.equal(one, other) for one, other in zip(weights, moved, strict=True))
    assert device == "cpu" or peak < plain
    assert int(tiered.manager.stats()["offloaded.blocks.total"]) > 0
    assert not tiered.manager.stats()["stayed.other_device.tensors.total"]


def test_a_checkpoint_goes_both_ways(device: str, tmp_path: Path) -> None:
    directions: list[tuple[When | None, When | None]] = [(None, "before"), ("before", None), ("before", "after")]
    for first, second in [(None, None), *directions]:
        folder = tmp_path / f"{first}-{second}"
        began, resumed = Loop(device, first), Loop(device, second)
        for i in range(4):
            began.step(i)
        began.accelerator.save_state(str(folder))
        resumed.accelerator.load_state(str(folder))
        assert [resumed.step(i) for i in range(4, 8)] == [began.step(i) for i in range(4, 8)]
