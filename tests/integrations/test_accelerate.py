"""accelerate and a loop of one's own: an optimizer registered before or after `prepare`, and peft's LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

accelerate = pytest.importorskip("accelerate", reason="make test-integrations installs it")

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
        model: Any = Stack(4, 16)
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
        x = torch.randn(32, 16, generator=generator).to(self.accelerator.device)
        with self.accelerator.accumulate(self.model):
            loss = self.model(x)
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss)


@pytest.mark.parametrize("registered", ["before", "after"])
def test_losses_are_those_of_the_plain_loop(device: str, registered: When) -> None:
    plain, tiered = Loop(device, None), Loop(device, registered)
    assert [plain.step(i) for i in range(6)] == [tiered.step(i) for i in range(6)]
    assert int(tiered.manager.stats()["offloaded.blocks.total"]) > 0
    assert not tiered.manager.stats()["stayed.other_device.tensors.total"]


def test_a_checkpoint_goes_both_ways(device: str, tmp_path: Path) -> None:
    for first, second in ((None, "before"), ("before", None), ("before", "before")):
        folder = tmp_path / f"{first}-{second}"
        began, resumed = Loop(device, first), Loop(device, second)  # type: ignore[arg-type]
        for i in range(4):
            began.step(i)
        began.accelerator.save_state(str(folder))
        resumed.accelerator.load_state(str(folder))
        assert [resumed.step(i) for i in range(4, 8)] == [began.step(i) for i in range(4, 8)]


def test_lora(device: str) -> None:
    peft = pytest.importorskip("peft", reason="make test-integrations installs it")

    def losses(tiered: bool) -> list[float]:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["up", "down"])
        model = peft.get_peft_model(Stack(4, 16), config).to(device)
        optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        with TieringManager(policy=LayerOrderPolicy(), device=device, host_bytes="64MiB") as manager:
            if tiered:
                manager.attach(model, min_bytes=1)
                optimizer = manager.register_optimizer(optimizer)
            result = []
            for i in range(4):
                x = torch.randn(32, 16, generator=torch.Generator().manual_seed(i)).to(device)
                loss = model(x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                result.append(float(loss))
            assert not tiered or int(manager.stats()["offloaded.blocks.total"]) > 0
            return result

    assert losses(tiered=True) == losses(tiered=False)
