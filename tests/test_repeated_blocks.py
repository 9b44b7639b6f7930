"""Which modules of a model are taken for its layers."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn

from tiered_mem.activations.offload_context import repeated_blocks


def linears(count: int, width: int = 4) -> list[nn.Module]:
    return [nn.Linear(width, width) for _ in range(count)]


class Block(nn.Module):
    """A layer with lists of its own, which are larger than the list that it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(linears(8, 64))


def test_the_list_with_the_most_parameters() -> None:
    model = nn.ModuleDict({"stem": nn.ModuleList(linears(5)), "body": nn.ModuleList(linears(2, 16))})
    assert repeated_blocks(model) == list(model["body"])


def test_of_equal_lists_the_first() -> None:
    model = nn.ModuleDict({"encoder": nn.ModuleList(linears(2)), "decoder": nn.ModuleList(linears(2))})
    assert repeated_blocks(model) == list(model["encoder"])


def test_lists_inside_a_layer_do_not_count() -> None:
    model = nn.ModuleDict({"body": nn.ModuleList([Block(), Block()]), "heads": nn.ModuleList(linears(2))})
    assert repeated_blocks(model) == list(model["body"])


def test_a_list_of_one_is_looked_into() -> None:
    model = nn.ModuleDict({"stages": nn.ModuleList([nn.ModuleList(linears(3))])})
    assert repeated_blocks(model) == list(model["stages"][0])


def test_a_list_may_mix_types_and_a_sequential_may_not() -> None:
    mixed = [nn.Linear(4, 4), nn.LayerNorm(4)]
    assert repeated_blocks(nn.ModuleDict({"body": nn.ModuleList(mixed)})) == mixed
    with pytest.raises(ValueError, match="layers of Sequential are unknown"):
        repeated_blocks(nn.Sequential(*mixed))


def test_a_model_that_is_a_list_or_a_sequential_itself() -> None:
    for model in (nn.ModuleList(linears(2)), nn.Sequential(*linears(2))):
        assert repeated_blocks(model) == list(model)


def test_a_sequential_with_names() -> None:
    model = nn.Sequential(
        OrderedDict(stem=nn.Embedding(3, 4), body=nn.Sequential(*linears(3)), head=nn.Linear(4, 3))
    )
    assert repeated_blocks(model) == list(model.body)


@pytest.mark.parametrize("layers", [[], linears(1), [nn.ReLU(), nn.ReLU()]], ids=["none", "one", "no weights"])
def test_too_little_to_be_layers(layers: list[nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"no ModuleList, nor a Sequential .* offload_context\(model.layers\)"):
        repeated_blocks(nn.ModuleDict({"body": nn.ModuleList(layers)}))
