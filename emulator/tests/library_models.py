"""Small models of transformers and diffusers, each with every part of its kind, made from config objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CLIPConfig,
    CLIPModel,
    ConvNextConfig,
    ConvNextForImageClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCABULARY, BATCH, LENGTH, WIDTH, INNER, HEADS, LAYERS, CLASSES = 64, 4, 12, 32, 48, 4, 2, 5
IMAGE, PATCH, MELS, FRAMES = 32, 4, 8, 24

To = Callable[[Tensor], Tensor]  # brings what a batch is made of to the model's device and dtype

STEPS = 2


@dataclass
class Trained:
    """On the CPU: the loss of each step, the gradients of the first, and the model's state after the last."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def train(name: str, device: str, dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> Trained:
    """A few steps of one of LIBRARY_MODELS, from the same weights and batches each time."""
    torch.manual_seed(0)
    kind = LIBRARY_MODELS[name]
    model = kind.make(dropout).to(device, dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[Tensor] = []
    gradients: dict[str, Tensor] = {}
    for _ in range(STEPS):
        loss = kind.loss(model, lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None))
        loss.backward()
        gradients = gradients or {
            key: each.grad.cpu() for key, each in model.named_parameters() if each.grad is not None
        }
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return Trained(losses, gradients, {key: value.cpu() for key, value in model.state_dict().items()})


@dataclass(frozen=True)
class LibraryModel:
    """dropout: the probability of each kind of dropout that the model has."""

    library: str
    make: Callable[[float], nn.Module]
    loss: Callable[[nn.Module, To], Tensor]


def tokens() -> Tensor:
    return torch.randint(1, VOCABULARY, (BATCH, LENGTH))


def padding() -> Tensor:
    """The mask of a batch in which one text is shorter than the others."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[0, -3:] = 0
    return mask


def next_token_loss(model: nn.Module, to: To) -> Tensor:
    inputs = to(tokens())
    loss: Tensor = model(input_ids=inputs, attention_mask=to(padding()), labels=inputs).loss
    return loss


def masked_token_loss(model: nn.Module, to: To) -> Tensor:
    labels = torch.where(torch.rand(BATCH, LENGTH) < 0.3, tokens(), -100)
    kinds = (torch.arange(LENGTH) > 5).long().expand(BATCH, -1)
    loss: Tensor = model(
        input_ids=to(tokens()), attention_mask=to(padding()), token_type_ids=to(kinds), labels=to(labels)
    ).loss
    return loss


def translation_loss(model: nn.Module, to: To) -> Tensor:
    labels = torch.randint(1, VOCABULARY, (BATCH, 7))
    loss: Tensor = model(input_ids=to(tokens()), attention_mask=to(padding()), labels=to(labels)).loss
    return loss


def transcription_loss(model: nn.Module, to: To) -> Tensor:
    loss: Tensor = model(input_features=to(torch.randn(BATCH, MELS, FRAMES)), labels=to(tokens())).loss
    return loss


def classification_loss(model: nn.Module, to: To) -> Tensor:
    images, labels = torch.randn(BATCH, 3, IMAGE, IMAGE), torch.randint(0, CLASSES, (BATCH,))
    loss: Tensor = model(pixel_values=to(images), labels=to(labels)).loss
    return loss


def contrastive_loss(model: nn.Module, to: To) -> Tensor:
    loss: Tensor = model(
        input_ids=to(tokens()),
        attention_mask=to(padding()),
        pixel_values=to(torch.randn(BATCH, 3, IMAGE, IMAGE)),
        return_loss=True,
    ).loss
    return loss


def denoising_loss(model: nn.Module, to: To, **given: Tensor) -> Tensor:
    images, noise = to(torch.randn(2, 3, 16, 16)), to(torch.randn(2, 3, 16, 16))
    times = to(torch.randint(0, 1000, (2,)))
    return F.mse_loss(model(images + noise, timestep=times, **given).sample, noise)


def conditional_denoising_loss(model: nn.Module, to: To) -> Tensor:
    return denoising_loss(model, to, class_labels=to(torch.randint(0, CLASSES, (2,))))


# What several configs call by the same names.
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
}
DECODER = SIZES | {"vocab_size": VOCABULARY, "num_key_value_heads": 2}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
DENOISER: dict[str, Any] = {"sample_size": 16, "in_channels": 3, "norm_num_groups": 4}


def dropouts(dropout: float, *names: str) -> dict[str, float]:
    return dict.fromkeys(names, dropout)


def gpt2(dropout: float) -> nn.Module:
    sizes = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    dropped = dropouts(dropout, "resid_pdrop", "embd_pdrop", "attn_pdrop")
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **ENDS, **dropped))


def llama(dropout: float) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**DECODER, attention_dropout=dropout))


def qwen3(dropout: float) -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**DECODER, head_dim=16, attention_dropout=dropout))


def mixtral(dropout: float) -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**DECODER, **experts, attention_dropout=dropout))


def mamba(dropout: float) -> nn.Module:
    sizes = {"hidden_size": WIDTH, "state_size": 4, "num_hidden_layers": LAYERS, "time_step_rank": 2}
    return MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, **sizes))


def bert(dropout: float) -> nn.Module:
    dropped = dropouts(dropout, "hidden_dropout_prob", "attention_probs_dropout_prob")
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **SIZES, **dropped))


def t5(dropout: float) -> nn.Module:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": INNER, "num_layers": LAYERS, "num_heads": HEADS}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes, dropout_rate=dropout)
    )


def whisper(dropout: float) -> nn.Module:
    of_each = {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": INNER}
    sizes = {f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in of_each.items()}
    positions = {"max_source_positions": FRAMES // 2, "max_target_positions": LENGTH}
    special = ENDS | {"pad_token_id": 0, "decoder_start_token_id": 1}
    dropped = dropouts(dropout, "dropout", "attention_dropout", "activation_dropout")
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCABULARY, num_mel_bins=MELS, d_model=WIDTH, **sizes, **positions, **special, **dropped
        )
    )


def vit(dropout: float) -> nn.Module:
    dropped = dropouts(dropout, "hidden_dropout_prob", "attention_probs_dropout_prob")
    return ViTForImageClassification(
        ViTConfig(**SIZES, image_size=IMAGE, patch_size=8, num_labels=CLASSES, **dropped)
    )


def clip(dropout: float) -> nn.Module:
    tower = SIZES | {"projection_dim": 16, "attention_dropout": dropout}
    ends = {"bos_token_id": 1, "eos_token_id": VOCABULARY - 1}
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH} | ends
    images = {"image_size": IMAGE, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=tower | text, vision_config=tower | images, projection_dim=16))


def resnet50(dropout: float) -> nn.Module:
    return ResNetForImageClassification(
        ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[3, 4, 6, 3], num_labels=CLASSES)
    )


def swin(dropout: float) -> nn.Module:
    sizes = {"patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    dropped = dropouts(dropout, "hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")
    return SwinForImageClassification(SwinConfig(image_size=IMAGE, num_labels=CLASSES, **sizes, **dropped))


def convnext(dropout: float) -> nn.Module:
    sizes = {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2}
    return ConvNextForImageClassification(ConvNextConfig(**sizes, num_labels=CLASSES, drop_path_rate=dropout))


def unet(dropout: float) -> nn.Module:
    from diffusers import UNet2DModel  # takes seconds, and every run of the tests reads the names below

    return UNet2DModel(
        **DENOISER,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        dropout=dropout,
    )


def dit(dropout: float) -> nn.Module:
    from diffusers import DiTTransformer2DModel
    from diffusers.models.embeddings import LabelEmbedding

    sizes = {"num_attention_heads": HEADS, "attention_head_dim": 8, "num_layers": LAYERS, "patch_size": 4}
    model = DiTTransformer2DModel(**DENOISER, **sizes, num_embeds_ada_norm=1000, dropout=dropout)
    for module in model.modules():
        if isinstance(module, LabelEmbedding):
            module.dropout_prob = dropout
    return model


LIBRARY_MODELS: dict[str, LibraryModel] = {
    "Llama": LibraryModel("transformers", llama, next_token_loss),
    "Qwen3": LibraryModel("transformers", qwen3, next_token_loss),
    "GPT2": LibraryModel("transformers", gpt2, next_token_loss),
    "BERT": LibraryModel("transformers", bert, masked_token_loss),
    "T5": LibraryModel("transformers", t5, translation_loss),
    "Whisper": LibraryModel("transformers", whisper, transcription_loss),
    "Mixtral": LibraryModel("transformers", mixtral, next_token_loss),
    "Mamba": LibraryModel("transformers", mamba, next_token_loss),
    "ViT": LibraryModel("transformers", vit, classification_loss),
    "CLIP": LibraryModel("transformers", clip, contrastive_loss),
    "ResNet50": LibraryModel("transformers", resnet50, classification_loss),
    "Swin": LibraryModel("transformers", swin, classification_loss),
    "ConvNeXt": LibraryModel("transformers", convnext, classification_loss),
    "UNet2D": LibraryModel("diffusers", unet, denoising_loss),
    "DiT": LibraryModel("diffusers", dit, conditional_denoising_loss),
}
