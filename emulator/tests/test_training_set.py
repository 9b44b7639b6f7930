"""What is trained most trains on the emulated NPU as on the CPU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from emulator.tests.compare import assert_equal
from emulator.tests.training_set import CLIPPING, MODELS, OPTIMIZERS, Trained, train
from emulator.tests.vision import ViT

pytestmark = [
    pytest.mark.once(why="what an operator computes is the same in each schedule"),
    pytest.mark.detector_only(why="takes long"),
]

# How far results may be from the CPU's, relative and absolute. The relative ones, and float32's absolute one, are
# those of torch.testing.assert_close. The other absolute ones are a last place of a weight of 0.5: attention is
# computed in float, where the CPU rounds its weights to the dtype, and so updates fall on either side.
TOLERANCE = {torch.float32: (1.3e-6, 1e-5), torch.bfloat16: (1.6e-2, 2e-3), torch.float16: (1e-3, 2.5e-4)}


class WideProducts(TorchDispatchMode):
    """The CPU multiplies narrow floats as the emulated NPU does, in float32, and not in a way of that CPU's."""

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return call(*args, **(kwargs or {}))
        return call(*(each.float() for each in args), **(kwargs or {})).to(args[0].dtype)


def assert_same(ours: Trained, theirs: Trained) -> None:
    assert_equal((ours.losses, ours.state), (theirs.losses, theirs.state))


def assert_near(ours: Trained, theirs: Trained, dtype: torch.dtype) -> None:
    relative, absolute = TOLERANCE[dtype]
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=relative, atol=absolute)
    torch.testing.assert_close(ours.state, theirs.state, rtol=relative, atol=absolute)


# Not with equal bits: torch_npu multiplies other matrices than PyTorch for the derivative of a matrix product, and
# fused attention sums in another order than the CPU's.
@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("model", [name for name in MODELS if name != "convnet"])
def test_a_transformer_trains_as_on_the_cpu(model: str, dtype: torch.dtype) -> None:
    assert_near(train("npu", MODELS[model], dtype=dtype), train("cpu", MODELS[model], dtype=dtype), dtype)


# Not with equal bits: the above, and autocast computes other operators in float16 on the NPU than on the CPU.
@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("model", [name for name in MODELS if name != "convnet"])
def test_a_transformer_trains_in_mixed_precision_as_on_the_cpu(model: str) -> None:
    ours, theirs = train("npu", MODELS[model], mixed=True), train("cpu", MODELS[model], mixed=True)
    assert_near(ours, theirs, torch.float16)


# By a plain optimizer: over a list, the CPU rounds the factor of an in-place product to the dtype first.
@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_convolutional_net_trains_with_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    ours = train("npu", MODELS["convnet"], "sgd_plain", dtype=dtype)
    with WideProducts():
        assert_same(ours, train("cpu", MODELS["convnet"], "sgd_plain", dtype=dtype))


@pytest.mark.usefixtures("native_only")
def test_a_convolutional_net_trains_in_mixed_precision_with_the_bits_of_the_cpu() -> None:
    ours = train("npu", MODELS["convnet"], mixed=True)
    with WideProducts():
        assert_same(ours, train("cpu", MODELS["convnet"], mixed=True))


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "mixed"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_steps_as_on_the_cpu(optimizer: str, mixed: bool) -> None:
    ours = train("npu", MODELS["convnet"], optimizer, mixed=mixed)
    with WideProducts():
        theirs = train("cpu", MODELS["convnet"], optimizer, mixed=mixed)
    if optimizer == "adamw_fused":  # torch_npu rounds its settings to float
        assert_near(ours, theirs, torch.float32)
    else:
        assert_same(ours, theirs)


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("clipping", CLIPPING)
def test_gradients_are_clipped_as_on_the_cpu(clipping: str) -> None:
    ours = train("npu", MODELS["convnet"], clipping=clipping)
    assert_same(ours, train("cpu", MODELS["convnet"], clipping=clipping))


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("optimizer", ["adamw_foreach", "adamw_plain", "adamw_fused", "sgd_foreach", "sgd_plain"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize(
    "model", ["gpt", pytest.param("gpt_modern", marks=pytest.mark.slow(why="most of it as in the other"))]
)
def test_gpt_trains_natively_and_with_the_same_bits_in_each_run(
    model: str, dtype: torch.dtype, tolerance: float, optimizer: str
) -> None:
    ours = train("npu", MODELS[model], optimizer, dtype=dtype)
    theirs = train("cpu", MODELS[model], optimizer, dtype=dtype)
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=tolerance, atol=0)
    assert_same(train("npu", MODELS[model], optimizer, dtype=dtype), ours)


def test_gpt_under_autocast_to_bfloat16_is_near_the_cpu() -> None:
    losses = {}
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        model = MODELS["gpt"]().to(device)
        tokens = torch.randint(0, 64, (4, 16)).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(tokens, tokens)
        loss.backward()
        gradient = model.blocks[0].attention.inputs.weight.grad
        losses[device] = [loss.item(), gradient.norm().item()]
    assert losses["npu"] == pytest.approx(losses["cpu"], rel=2e-2)


@pytest.mark.usefixtures("native_only")
def test_dropout_follows_the_seed() -> None:
    first = train("npu", lambda: ViT(0.1))
    assert_same(train("npu", lambda: ViT(0.1)), first)
    losses = [loss.item() for loss in first.losses]
    assert [loss.item() for loss in train("npu", lambda: ViT(0.0)).losses] != losses
    assert [loss.item() for loss in train("npu", lambda: ViT(0.1), seed=1).losses] != losses


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_computes_the_same_again(reentrant: bool, dropout: float) -> None:
    ours = train("npu", lambda: ViT(dropout, reentrant))
    assert_same(ours, train("npu", lambda: ViT(dropout)))


def scaled_steps(device: str) -> list[Tensor]:
    """The weight and the scale after each step, of which the second meets an infinite gradient."""
    weight = nn.Parameter(torch.arange(6.0, device=device) - 3)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
    seen = []
    for factor in (1.0, float("inf"), 2.0, 3.0):
        optimizer.zero_grad()
        scaler.scale(F.silu(weight).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        seen += [weight.detach().clone().cpu(), torch.tensor(scaler.get_scale())]
    return seen


@pytest.mark.usefixtures("native_only")
def test_the_scaler_skips_a_step_with_infinite_gradients() -> None:
    results = scaled_steps("npu")
    assert_equal(results, scaled_steps("cpu"))
    weights, scales = results[::2], results[1::2]
    assert weights[0].equal(weights[1])
    assert [scale.item() for scale in scales] == [8, 4, 4, 8]


@pytest.mark.usefixtures("native_only")
def test_batch_norm_keeps_the_statistics_of_the_cpu() -> None:
    images = torch.randn(2, 8, 3, 4, 4)
    norms = {device: nn.BatchNorm2d(3).to(device) for device in ("npu", "cpu")}
    for device, norm in norms.items():
        for batch in images:
            norm(batch.to(device))
    assert_equal(norms["npu"].state_dict(), norms["cpu"].state_dict())
