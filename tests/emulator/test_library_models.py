"""Models of transformers and diffusers train on the emulated NPU as on the CPU."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.unets.unet_2d import UNet2DModel
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, T5Config, T5ForConditionalGeneration

VOCABULARY, BATCH, LENGTH, STEPS = 64, 4, 12, 4


def mixtral() -> tuple[nn.Module, Callable[[nn.Module, Callable[[Tensor], Tensor]], Tensor]]:
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )

    def loss(model: nn.Module, to: Callable[[Tensor], Tensor]) -> Tensor:
        tokens = to(torch.randint(0, VOCABULARY, (BATCH, LENGTH)))
        result: Tensor = model(input_ids=tokens, labels=tokens).loss
        return result

    return MixtralForCausalLM(config), loss


def t5() -> tuple[nn.Module, Callable[[nn.Module, Callable[[Tensor], Tensor]], Tensor]]:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )

    def loss(model: nn.Module, to: Callable[[Tensor], Tensor]) -> Tensor:
        tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH))
        mask = torch.ones_like(tokens)
        mask[0, -3:] = 0
        labels = torch.randint(1, VOCABULARY, (BATCH, 7))
        result: Tensor = model(input_ids=to(tokens), attention_mask=to(mask), labels=to(labels)).loss
        return result

    return T5ForConditionalGeneration(config), loss


def unet() -> tuple[nn.Module, Callable[[nn.Module, Callable[[Tensor], Tensor]], Tensor]]:
    model = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )

    def loss(model: nn.Module, to: Callable[[Tensor], Tensor]) -> Tensor:
        images, noise = to(torch.randn(2, 3, 16, 16)), to(torch.randn(2, 3, 16, 16))
        times = to(torch.randint(0, 1000, (2,)))
        return F.mse_loss(model(images + noise, times).sample, noise)

    return model, loss


# What runs on the CPU: the size of the result is known only then.
WAITED_FOR: dict[str, set[str]] = {"mixtral": {"aten.nonzero.default"}, "t5": set(), "unet": set()}
MODELS: dict[str, Any] = {"mixtral": mixtral, "t5": t5, "unet": unet}


@dataclass(frozen=True)
class Trained:
    losses: list[Tensor]
    gradients: dict[str, Tensor]  # of the first step
    weights: dict[str, Tensor]  # after the last


def train(name: str, device: str) -> Trained:
    torch.manual_seed(0)
    model, loss_of = MODELS[name]()
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    gradients: dict[str, Tensor] = {}
    for _ in range(STEPS):
        loss = loss_of(model, lambda tensor: tensor.to(device))
        loss.backward()
        gradients = gradients or {key: each.grad.cpu() for key, each in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return Trained(losses, gradients, {key: value.cpu() for key, value in model.state_dict().items()})


# Not with equal bits: torch_npu multiplies other matrices than PyTorch for the derivative of a matrix product, and
# fused attention sums in another order than the CPU's. AdamW makes a whole step of a gradient that is rounding
# alone, as that of the biases of keys is; so gradients are compared, and the losses that the steps lead to.
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_a_library_trains_as_on_the_cpu(name: str) -> None:
    ours, theirs = train(name, "npu"), train(name, "cpu")
    torch.testing.assert_close(ours.losses, theirs.losses)
    torch.testing.assert_close(ours.gradients, theirs.gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_natively_and_with_the_same_bits_in_each_run(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="ascend_emulator.fallback"):
        ours, again = train(name, "npu"), train(name, "npu")
    for key in ("losses", "gradients", "weights"):
        torch.testing.assert_close(getattr(again, key), getattr(ours, key), rtol=0, atol=0)
    assert {str(record.args[0]) for record in caplog.records if record.args} <= WAITED_FOR[name]
