"""MindSpeed's own managers with our feature, over a package that stands in for Megatron."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("mindspeed", reason="MindSpeed is not installed: clone it, and put it on PYTHONPATH")

from mindspeed.features_manager import MindSpeedFeaturesManager

from tests.models import Stack
from tiered_mem import TieringManager
from tiered_mem.activations.attachment import is_attached
from tiered_mem.integrations.mindspeed import TieredMemoryFeature

pytestmark = pytest.mark.slow(why="a framework that takes seconds to import")

MEGATRON = """
import torch
from tests.models import Stack

def get_model(device):
    torch.manual_seed(0)
    return [Stack(4, 128).to(device) for _ in range(2)]

def train(device):
    chunks = get_model(device)
    for i in range(2):
        x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(i)).to(device)
        for chunk in chunks:
            chunk(x).backward()
    return chunks
"""


@pytest.fixture
def megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What MindSpeed wraps, as much as is needed of it."""
    (tmp_path / "megatron/training").mkdir(parents=True)
    (tmp_path / "megatron/training/training.py").write_text(MEGATRON)
    monkeypatch.syspath_prepend(tmp_path)
    import megatron.training.training

    return megatron.training.training


@pytest.fixture
def features(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(MindSpeedFeaturesManager, "FEATURES_LIST", [])
    MindSpeedFeaturesManager.FEATURES_LIST.append(TieredMemoryFeature())
    yield
    MindSpeedFeaturesManager.remove_patches()


def arguments(*said: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimization-level", type=int, default=2)
    parser.add_argument("--swap-attention", action="store_true")
    MindSpeedFeaturesManager.register_features_args(parser)
    read = parser.parse_args(said)
    MindSpeedFeaturesManager.validate_features_args(read)
    return read


@pytest.mark.usefixtures("features")
def test_the_chunks_are_attached_where_the_flag_says_so(
    megatron: Any, device: str, default: TieringManager
) -> None:
    MindSpeedFeaturesManager.apply_features_patches(arguments())
    expected = megatron.train(device)
    assert not any(map(is_attached, expected))
    before = int(default.stats()["offloaded.blocks.total"])
    MindSpeedFeaturesManager.apply_features_patches(arguments("--tiered-memory"))
    chunks: list[Stack] = megatron.train(device)
    assert all(map(is_attached, chunks))
    assert int(default.stats()["offloaded.blocks.total"]) > before
    for chunk, other in zip(chunks, expected, strict=True):
        pairs = zip(chunk.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)


@pytest.mark.usefixtures("features")
def test_a_second_offloader_is_an_error_that_names_both() -> None:
    with pytest.raises(ValueError, match="--swap-attention and --tiered-memory would both move"):
        arguments("--tiered-memory", "--swap-attention")
