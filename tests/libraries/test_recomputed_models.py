"""Models of libraries train with equal bits where their layers are computed again in backward."""

from __future__ import annotations

from benchmarks import torchvision_operators  # noqa: F401

# isort: split

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from emulator.tests.library_models import LIBRARY_MODELS, LibraryModel
from tests.libraries.more_models import MORE_MODELS
from tests.libraries.training import trained
from tests.models import equal
from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy

pytestmark = pytest.mark.slow(why="28 models of libraries that take long to import, each trained twice")

ALL = LIBRARY_MODELS | MORE_MODELS
# With batch norm in each layer. DenseNet has a convolution and a pool among its layers.
EXCLUDED = ("ResNet50", "ResNet18", "EfficientNet", "RegNet")
STEPS = 4  # of two layers of a kind the second one has its trial in the second


def train(kind: LibraryModel, device: str, manager: TieringManager | None = None, how: Any = None) -> list[Tensor]:
    """The losses of some steps, the gradients of the last and the state in the end, with dropout where there is."""
    torch.manual_seed(0)
    model: Any = kind.make(0.1).to(device).train()
    if kind.library == "transformers":
        for config in (model.config, model.config.get_text_config()):
            config.use_cache = False  # what fills a cache is not computed again
    if manager is not None:
        manager.attach(model, min_bytes=1024, recompute=how)
    losses = trained(kind, model, device, STEPS)
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return [each.cpu() for each in (*losses, *gradients, *model.state_dict().values())]


@pytest.mark.parametrize("how", ["cheap", "full"])
@pytest.mark.parametrize("name", ALL)
def test_a_model_whose_layers_are_computed_again(name: str, how: Any, device: str) -> None:
    if ALL[name].library == "torchvision" and importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed: make test-models")
    plain = train(ALL[name], device)
    with TieringManager(policy=LayerOrderPolicy(0), device=device, host_bytes="64MiB") as manager:
        assert equal(train(ALL[name], device, manager, how), plain)
        kinds = manager._contexts._recomputer._kinds.values()
        assert any(kind.excluded is None for kind in kinds) == (name not in EXCLUDED)
