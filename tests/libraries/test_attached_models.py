"""Models of libraries train with equal bits when they are attached, and most of what they save moves."""

from __future__ import annotations

import importlib.util

from benchmarks import torchvision_operators  # noqa: F401

# isort: split

import pytest
import torch
from torch import Tensor

from emulator.tests.library_models import LIBRARY_MODELS, LibraryModel
from tests.conftest import MakeManager
from tests.libraries.more_models import MORE_MODELS
from tests.libraries.training import trained
from tiered_mem import TieringManager

pytestmark = pytest.mark.slow(why="28 models of libraries that take long to import")

ALL = LIBRARY_MODELS | MORE_MODELS
STEPS = 2


def train(kind: LibraryModel, device: str, manager: TieringManager | None = None) -> list[Tensor]:
    """The losses of a few steps, and the gradients of the last, with dropout where the model has it."""
    torch.manual_seed(0)
    model = kind.make(0.1).to(device).train()
    if manager is not None:
        manager.attach(model, min_bytes=1024)
    losses = trained(kind, model, device, STEPS)
    return losses + [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("name", ALL)
def test_an_attached_model_of_a_library(name: str, device: str, make_manager: MakeManager) -> None:
    if ALL[name].library == "torchvision" and importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed: make test-models")
    plain = train(ALL[name], device)
    manager = make_manager(in_flight=1)
    attached = train(ALL[name], device, manager)
    assert all(torch.equal(one, other) for one, other in zip(attached, plain, strict=True))
    stats = manager.stats()
    moved = int(stats["offloaded.bytes.total"])
    stayed = sum(int(stats[key]) for key in stats if key.startswith("stayed.") and key.endswith(".bytes.total"))
    assert moved > 0.7 * (moved + stayed)
