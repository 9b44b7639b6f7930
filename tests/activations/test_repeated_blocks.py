"""Which modules of a model are taken for its layers."""

from __future__ import annotations

import logging
from collections import OrderedDict

import pytest
from torch import nn

from tiered_mem.activations.layers import repeated_blocks

pytestmark = pytest.mark.once(why="it needs no device")


def linears(count: int, width: int = 4) -> list[nn.Module]:
    return [nn.Linear(width, width) for _ in range(count)]


class Block(nn.Module):
    """A layer with lists of its own, which are larger than the list that it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(*linears(2, 64)) for _ in range(8))


def blocks(count: int) -> list[nn.Module]:
    return [Block() for _ in range(count)]


def steps(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def test_all_runs_whatever_their_size() -> None:
    model = nn.ModuleDict({"encoder": nn.ModuleList(blocks(5)), "decoder": nn.ModuleList(blocks(2))})
    assert repeated_blocks(model) == [*model["encoder"], *model["decoder"]]


def test_lists_inside_a_layer_do_not_count() -> None:
    model = nn.ModuleDict({"body": nn.ModuleList(blocks(2))})
    assert repeated_blocks(model) == list(model["body"])


def test_lists_of_single_modules_do_not_count_beside_blocks() -> None:
    model = nn.ModuleDict({"body": nn.ModuleList(blocks(2)), "heads": nn.ModuleList(linears(2))})
    assert repeated_blocks(model) == list(model["body"])


def test_they_count_where_there_are_no_blocks() -> None:
    model = nn.ModuleDict({"stem": nn.ModuleList(linears(5)), "body": nn.Sequential(*linears(2))})
    assert repeated_blocks(model) == [*model["stem"], *model["body"]]


def test_a_list_of_one_is_looked_into() -> None:
    model = nn.ModuleDict({"stages": nn.ModuleList([nn.ModuleList(blocks(3))])})
    assert repeated_blocks(model) == list(model["stages"][0])


def test_lists_in_a_list_stand_for_what_is_in_them() -> None:
    model = nn.ModuleList([nn.ModuleList(blocks(2)), nn.Sequential(*blocks(3))])
    assert repeated_blocks(model) == [*model[0], *model[1]]


def test_the_stages_of_a_pyramid_with_something_in_between() -> None:
    model = steps(nn.Conv2d(3, 4, 1), steps(*blocks(2)), nn.Conv2d(4, 8, 1), steps(*blocks(3)))
    assert repeated_blocks(model) == [*model[1], *model[3]]


def stage(width: int) -> nn.Module:
    """Two blocks, and what makes the pictures smaller."""
    pair = [steps(nn.Linear(width, width), nn.ReLU()) for _ in range(2)]
    return nn.ModuleDict({"blocks": nn.ModuleList(pair), "down": nn.Linear(width, 2 * width)})


def test_the_stages_of_a_pyramid_stand_for_their_blocks() -> None:
    stages = [stage(4), stage(8)]
    model = nn.ModuleDict({"stages": nn.ModuleList(stages), "head": nn.Linear(16, 2)})
    assert repeated_blocks(model) == [*stages[0]["blocks"], *stages[1]["blocks"]]


def test_layers_of_like_size_are_layers_whatever_is_in_them() -> None:
    layers = [stage(8), stage(8), stage(9)]
    assert repeated_blocks(nn.ModuleDict({"body": nn.ModuleList(layers)})) == layers


def test_a_list_may_mix_types_of_blocks() -> None:
    mixed = [Block(), nn.TransformerEncoderLayer(4, 1), nn.Identity()]
    assert repeated_blocks(nn.ModuleDict({"body": nn.ModuleList(mixed)})) == mixed


def test_a_block_that_is_alone_in_a_list_may_be_called_repeatedly() -> None:
    group = nn.TransformerEncoderLayer(4, 1)
    model = nn.ModuleDict({"groups": nn.ModuleList([group]), "head": nn.Linear(4, 4)})
    assert repeated_blocks(model) == [group]


def test_a_model_without_runs_is_taken_step_by_step() -> None:
    features = steps(nn.Conv2d(3, 4, 1), nn.ReLU(), steps(nn.Conv2d(4, 4, 1), nn.ReLU()))
    model = nn.ModuleDict({"features": features, "head": nn.Linear(4, 4)})
    assert repeated_blocks(model) == [features[0], features[1], *features[2]]


def test_a_layer_in_two_lists_is_one() -> None:
    shared = blocks(2)
    assert repeated_blocks(nn.ModuleDict({"a": nn.ModuleList(shared), "b": nn.ModuleList(shared)})) == shared


def test_a_model_that_is_a_list_or_a_sequential_itself() -> None:
    for layers in (linears(2), blocks(2)):
        for model in (nn.ModuleList(layers), nn.Sequential(*layers)):
            assert repeated_blocks(model) == list(model)


def test_a_sequential_with_names() -> None:
    model = nn.Sequential(
        OrderedDict(stem=nn.Embedding(3, 4), body=nn.Sequential(*linears(3)), head=nn.Linear(4, 3))
    )
    assert repeated_blocks(model) == list(model.body)


def test_one_line_says_what_was_taken(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"body": nn.ModuleList([*blocks(2), nn.Linear(2, 2)]), "tail": nn.ModuleList(blocks(3))})
    with caplog.at_level(logging.INFO, "tiered_mem"):
        repeated_blocks(model)
    assert caplog.messages == ["the layers of ModuleDict are 2 Block and 1 Linear of body, 3 Block of tail"]


@pytest.mark.parametrize("layers", [[], linears(1), [nn.ReLU(), nn.ReLU()]], ids=["none", "one", "no weights"])
def test_too_little_to_be_layers(layers: list[nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"no ModuleList or Sequential .* offload_context\(model.layers\)"):
        repeated_blocks(nn.ModuleDict({"body": nn.ModuleList(layers)}))
