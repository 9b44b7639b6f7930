"""Models of transformers and diffusers train on the emulated NPU as on the CPU."""

import pytest
import torch
from torch import Tensor

from emulator.coverage import PAGE, table, table_in
from emulator.tests.compare import assert_equal
from emulator.tests.library_models import LIBRARY_MODELS, train

pytestmark = [
    pytest.mark.once(why="what an operator computes is the same in each schedule"),
    pytest.mark.detector_only(why="takes long"),
]

# Of these the NPU computes every operator by the CPU's own kernels, in the same order.
SAME_BITS = {"ResNet50"}
# How far gradients may be from the CPU's, absolutely. CLIP multiplies its logits, and their rounding, by 14.
ABSOLUTE = {"CLIP": 1e-5}


# Most not with equal bits: torch_npu multiplies other matrices than PyTorch for the derivative of a matrix product,
# and fused attention sums in another order than the CPU's. AdamW makes a whole step of a gradient that is rounding
# alone, as that of the biases of keys is; so gradients are compared, and the losses that the steps lead to.
@pytest.mark.parametrize("name", LIBRARY_MODELS)
def test_a_model_of_a_library_trains_as_on_the_cpu(name: str) -> None:
    ours, theirs = train(name, "npu"), train(name, "cpu")
    if name in SAME_BITS:
        assert_equal(vars(ours), vars(theirs))
    torch.testing.assert_close(ours.losses, theirs.losses)
    torch.testing.assert_close(ours.gradients, theirs.gradients, rtol=1e-4, atol=ABSOLUTE.get(name, 1e-6))


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Of all gradients together, as one vector; relative to its length."""
    assert ours.keys() == theirs.keys()
    difference, length = (
        torch.stack([torch.linalg.vector_norm(each.double()) for each in vector]).norm()
        for vector in ([ours[key] - theirs[key] for key in theirs], theirs.values())
    )
    return float(difference / length)


# Near: a bfloat16 has eight bits, and attention is computed in float here, where the CPU rounds its weights to the
# dtype. The losses differ by two units in the last place at most.
@pytest.mark.slow(why="each model once more")
@pytest.mark.parametrize("name", LIBRARY_MODELS)
def test_it_trains_in_bfloat16_near_the_cpu(name: str) -> None:
    ours, theirs = (train(name, device, torch.bfloat16) for device in ("npu", "cpu"))
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1.6e-2, atol=0)
    assert distance(ours.gradients, theirs.gradients) < 0.03


@pytest.mark.slow(why="each model twice more")
@pytest.mark.parametrize("name", LIBRARY_MODELS)
def test_it_trains_with_the_same_bits_in_each_run(name: str) -> None:
    ours, again = (train(name, "npu", dropout=0.1) for _ in range(2))
    assert_equal(vars(again), vars(ours))


# It names what runs on the CPU, too.
@pytest.mark.slow(why="it trains all that the table names")
def test_the_table_in_the_docs_is_what_training_calls() -> None:
    assert table_in(PAGE.read_text()) == table(), "python -m ascend_emulator emulator/coverage.py --write"
