"""torchao's low-bit optimizers: saved, loaded and resumed in four directions, with equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

low_bit = pytest.importorskip("torchao.optim", reason="make test-integrations installs it")

from tests.models import Stack  # noqa: E402
from tiered_mem import TieringManager  # noqa: E402

pytestmark = [
    pytest.mark.slow(why="trainings with a framework that takes seconds to import"),
    pytest.mark.filterwarnings("ignore"),  # its own
]


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao compiles its steps, for which torch_npu needs a compiler that it does not bring."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # torch.compile reads it in each call


KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
# How the optimizer is registered; None is a plain training.
REGISTERED: dict[str, dict[str, Any] | None] = {"plain": None, "tiered": {}, "separable": {"separable": True}}


class Run:
    """A training of a small stack of layers, the same each time."""

    def __init__(self, kind: str, device: str, manager: TieringManager, registered: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = Stack(4).to(device)
        optimizer = getattr(low_bit, kind)(self.model.parameters(), lr=1e-2)
        if registered is not None:
            optimizer = manager.register_optimizer(optimizer, bucket_bytes="32KiB", **registered)
        self.optimizer = optimizer

    def steps(self, *numbers: int) -> list[torch.Tensor]:
        """The weights after them."""
        for number in numbers:
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(number))
            self.model(x.to(self.device)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return [param.detach().cpu().clone() for param in self.model.parameters()]


@pytest.mark.parametrize("second", REGISTERED)
@pytest.mark.parametrize("first", REGISTERED)
@pytest.mark.parametrize("kind", KINDS)
def test_resume_in_all_directions(kind: str, first: str, second: str, device: str, tmp_path: Path) -> None:
    with TieringManager(device=device, policy="layer-order", host_bytes="64MiB") as manager:
        expected = Run(kind, device, manager, None).steps(0, 1, 2, 3)
        run = Run(kind, device, manager, REGISTERED[first])
        run.steps(0, 1)
        torch.save([run.model.state_dict(), run.optimizer.state_dict()], tmp_path / "checkpoint.pt")
        model, optimizer = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        resumed = Run(kind, device, manager, REGISTERED[second])
        resumed.model.load_state_dict(model)
        resumed.optimizer.load_state_dict(optimizer)
        assert all(map(torch.equal, resumed.steps(2, 3), expected))


@pytest.mark.parametrize("kind", KINDS)
def test_states_on_the_device_can_be_saved(kind: str, device: str, tmp_path: Path) -> None:
    with TieringManager(device=device, policy="layer-order", host_bytes="64MiB") as manager:
        run = Run(kind, device, manager, {})
        run.steps(0, 1)
        with run.optimizer.present() as wrapped:
            torch.save(wrapped.state_dict(), tmp_path / "present.pt")
        torch.save(run.optimizer.give_back().state_dict(), tmp_path / "given back.pt")
        present, given_back = map(codes, (tmp_path / "present.pt", tmp_path / "given back.pt"))
        assert present
        assert all(map(torch.equal, present, given_back))


def codes(path: Path) -> list[torch.Tensor]:
    """The bytes of all states of few bits in a file."""
    states = torch.load(path, weights_only=True)["state"].values()
    return [each.codes.view(torch.uint8) for state in states for each in state.values() if hasattr(each, "codes")]
