"""Fourteen models of four libraries, made from config objects, of a size at which one step takes about a second.

Their layers are few and narrow, and their batches long enough for most of what they save to be tensors of 1 MiB and
more.
Needs what `make models` installs, and is imported after the device is there.
"""

from __future__ import annotations

from benchmarks import torchvision_operators  # noqa: F401

# isort: split

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm.models.vision_transformer
import torch
import torch.nn.functional as F
import torchvision
import transformers
from diffusers import DiTTransformer2DModel, UNet2DModel
from torch import Tensor, nn

VOCABULARY, BATCH, LENGTH, WIDTH, HEADS, LAYERS, CLASSES = 2048, 4, 256, 384, 6, 6, 100

To = Callable[[Tensor], Tensor]  # brings what a batch is made of to the model's device


@dataclass(frozen=True)
class ZooModel:
    """loss: of one step, on a batch from torch's generator."""

    library: str
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, To], Tensor]


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (BATCH, length))


def language(model: nn.Module, to: To) -> Tensor:
    inputs = to(tokens())
    loss: Tensor = model(input_ids=inputs, labels=inputs).loss
    return loss


def translation(model: nn.Module, to: To) -> Tensor:
    loss: Tensor = model(input_ids=to(tokens()), labels=to(tokens())).loss
    return loss


def transcription(model: nn.Module, to: To) -> Tensor:
    loss: Tensor = model(input_features=to(torch.randn(BATCH, 80, 2 * LENGTH)), labels=to(tokens())).loss
    return loss


def contrast(model: nn.Module, to: To) -> Tensor:
    images, texts = to(torch.randn(16, 3, 128, 128)), to(torch.randint(1, VOCABULARY, (16, 64)))
    loss: Tensor = model(input_ids=texts, pixel_values=images, return_loss=True).loss
    return loss


def classification(images: int, size: int) -> Callable[[nn.Module, To], Tensor]:
    def loss(model: nn.Module, to: To) -> Tensor:
        pixels, labels = torch.randn(images, 3, size, size), torch.randint(0, CLASSES, (images,))
        return F.cross_entropy(model(to(pixels)), to(labels))

    return loss


def denoising(channels: int, size: int, **more: Any) -> Callable[[nn.Module, To], Tensor]:
    def loss(model: nn.Module, to: To) -> Tensor:
        images, noise = (to(torch.randn(BATCH, channels, size, size)) for _ in range(2))
        times = to(torch.randint(0, 1000, (BATCH,)))
        extra = {name: to(torch.randint(0, most, (BATCH,))) for name, most in more.items()}
        return F.mse_loss(model(images + noise, timestep=times, **extra).sample, noise)

    return loss


def decoder(config: type[Any], model: type[Any], **more: Any) -> Callable[[], nn.Module]:
    """A language model of Llama's kind."""

    def make() -> nn.Module:
        made: nn.Module = model(
            config(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=2 * WIDTH,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                num_key_value_heads=2,
                **more,
            )
        )
        return made

    return make


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS
    )
    config.bos_token_id = config.eos_token_id = 0
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH,
            max_position_embeddings=LENGTH,
        )
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=WIDTH // HEADS,
            d_ff=2 * WIDTH,
            num_layers=LAYERS // 2,
            num_heads=HEADS,
            decoder_start_token_id=0,
        )
    )


def whisper() -> nn.Module:
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=80,
            d_model=WIDTH,
            encoder_layers=LAYERS // 2,
            decoder_layers=LAYERS // 2,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=4 * WIDTH,
            decoder_ffn_dim=4 * WIDTH,
            max_source_positions=LENGTH,
            max_target_positions=LENGTH,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    )


def clip() -> nn.Module:
    tower = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": LAYERS // 2,
        "num_attention_heads": HEADS,
    }
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1}
    images = {"image_size": 128, "patch_size": 16}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=tower | text, vision_config=tower | images))


def vit() -> nn.Module:
    return timm.models.vision_transformer.VisionTransformer(
        img_size=128, patch_size=8, num_classes=CLASSES, embed_dim=WIDTH, depth=LAYERS, num_heads=HEADS
    )


def convnext() -> nn.Module:
    return timm.models.ConvNeXt(num_classes=CLASSES, depths=(2, 2, 4, 2), dims=(40, 80, 160, 320))


def resnet50() -> nn.Module:
    return torchvision.models.resnet50(num_classes=CLASSES)


def swin() -> nn.Module:
    return torchvision.models.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=48,
        depths=[2, 2, 4, 2],
        num_heads=[3, 6, 12, 24],
        window_size=[7, 7],
        num_classes=CLASSES,
    )


def unet() -> nn.Module:
    return UNet2DModel(
        sample_size=64,
        block_out_channels=(32, 64, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )


def dit() -> nn.Module:
    return DiTTransformer2DModel(
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH // HEADS,
        in_channels=4,
        num_layers=LAYERS,
        sample_size=32,
        patch_size=2,
        num_embeds_ada_norm=1000,
        norm_num_groups=8,
    )


MODELS: dict[str, ZooModel] = {
    "Llama": ZooModel("transformers", decoder(transformers.LlamaConfig, transformers.LlamaForCausalLM), language),
    "Qwen3": ZooModel(
        "transformers", decoder(transformers.Qwen3Config, transformers.Qwen3ForCausalLM, head_dim=64), language
    ),
    "GPT2": ZooModel("transformers", gpt2, language),
    "BERT": ZooModel("transformers", bert, language),
    "T5": ZooModel("transformers", t5, translation),
    "Whisper": ZooModel("transformers", whisper, transcription),
    "Mixtral": ZooModel(
        "transformers",
        decoder(
            transformers.MixtralConfig,
            transformers.MixtralForCausalLM,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
        ),
        language,
    ),
    "ViT": ZooModel("timm", vit, classification(4, 128)),
    "CLIP": ZooModel("transformers", clip, contrast),
    "ResNet50": ZooModel("torchvision", resnet50, classification(4, 128)),
    "Swin": ZooModel("torchvision", swin, classification(4, 224)),
    "ConvNeXt": ZooModel("timm", convnext, classification(4, 224)),
    "UNet2D": ZooModel("diffusers", unet, denoising(3, 64)),
    "DiT": ZooModel("diffusers", dit, denoising(4, 32, class_labels=1000)),
}
