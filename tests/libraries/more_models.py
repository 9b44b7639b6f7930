"""Further small models of libraries, by how their layers lie: two stacks, towers, stages, children of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from emulator.tests.library_models import LAYERS, VOCABULARY, WIDTH, LibraryModel, To, tokens, translation_loss


def bart(dropout: float) -> nn.Module:
    sizes = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": LAYERS, "attention_heads": 4, "ffn_dim": 48}.items()
    }
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            max_position_embeddings=64,
            dropout=dropout,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            forced_eos_token_id=2,
            **sizes,
        )
    )


def transformer(dropout: float) -> nn.Module:
    return nn.Transformer(WIDTH, 4, LAYERS, LAYERS, 48, dropout, batch_first=True)


def llava(dropout: float) -> nn.Module:
    text = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
    }
    images = {
        "model_type": "clip_vision_model",
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS + 1,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 16,
    }
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config=text, vision_config=images, image_token_index=VOCABULARY - 1, image_seq_length=4
        )
    )


def detr(dropout: float) -> nn.Module:
    backbone = {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 16, 32, 32],
        "depths": [2, 2, 2, 2],
        "layer_type": "basic",
        "out_features": ["stage4"],
    }
    return transformers.DetrForObjectDetection(
        transformers.DetrConfig(
            use_timm_backbone=False,
            backbone_config=backbone,
            backbone=None,
            use_pretrained_backbone=False,
            d_model=WIDTH,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_queries=8,
            dropout=dropout,
        )
    )


def conditional_unet(dropout: float) -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=4,
        attention_head_dim=8,
        cross_attention_dim=WIDTH,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        dropout=dropout,
    )


def flux(dropout: float) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )


def of_torchvision(name: str, **sizes: Any) -> Callable[[float], nn.Module]:
    def make(dropout: float) -> nn.Module:
        import torchvision

        model: nn.Module = getattr(torchvision.models, name)(num_classes=5, **sizes)
        return model

    return make


def sequence_loss(model: nn.Module, to: To) -> Tensor:
    outputs: Tensor = model(to(torch.randn(4, 12, WIDTH)), to(torch.randn(4, 7, WIDTH)))
    return outputs.square().mean()


def picture_loss(model: nn.Module, to: To) -> Tensor:
    texts = tokens().clamp(max=VOCABULARY - 2)
    texts[:, 2:6] = VOCABULARY - 1  # the places of the image
    inputs = to(texts)
    loss: Tensor = model(input_ids=inputs, pixel_values=to(torch.randn(4, 3, 32, 32)), labels=inputs).loss
    return loss


def detection_loss(model: nn.Module, to: To) -> Tensor:
    found = model(pixel_values=to(torch.randn(2, 3, 64, 64)))
    loss: Tensor = found.logits.square().mean() + found.pred_boxes.square().mean()
    return loss


def guided_loss(model: nn.Module, to: To) -> Tensor:
    images, texts = to(torch.randn(2, 4, 16, 16)), to(torch.randn(2, 6, WIDTH))
    loss: Tensor = model(images, to(torch.tensor([3, 500])), encoder_hidden_states=texts).sample.square().mean()
    return loss


def flow_loss(model: nn.Module, to: To) -> Tensor:
    outputs = model(
        hidden_states=to(torch.randn(2, 16, 8)),
        encoder_hidden_states=to(torch.randn(2, 6, WIDTH)),
        pooled_projections=to(torch.randn(2, WIDTH)),
        timestep=to(torch.tensor([0.3, 0.7])),
        img_ids=to(torch.zeros(16, 3)),
        txt_ids=to(torch.zeros(6, 3)),
    )
    loss: Tensor = outputs.sample.square().mean()
    return loss


def image_loss(model: nn.Module, to: To, size: int = 64) -> Tensor:
    outputs: Tensor = model(to(torch.randn(2, 3, size, size)))
    return outputs.square().mean()


MORE_MODELS: dict[str, LibraryModel] = {
    "Bart": LibraryModel("transformers", bart, translation_loss),
    "Transformer": LibraryModel("torch", transformer, sequence_loss),
    "Llava": LibraryModel("transformers", llava, picture_loss),
    "DETR": LibraryModel("transformers", detr, detection_loss),
    "UNet2DCondition": LibraryModel("diffusers", conditional_unet, guided_loss),
    "Flux": LibraryModel("diffusers", flux, flow_loss),
    "ResNet18": LibraryModel("torchvision", of_torchvision("resnet18"), partial(image_loss, size=128)),
    "SwinTransformer": LibraryModel(
        "torchvision",
        of_torchvision(
            "SwinTransformer",
            patch_size=[4, 4],
            embed_dim=12,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=[4, 4],
        ),
        image_loss,
    ),
    "ConvNeXt tiny": LibraryModel("torchvision", of_torchvision("convnext_tiny"), image_loss),
    "EfficientNet": LibraryModel("torchvision", of_torchvision("efficientnet_b0"), image_loss),
    "VGG": LibraryModel("torchvision", of_torchvision("vgg11"), image_loss),
    "DenseNet": LibraryModel("torchvision", of_torchvision("densenet121"), image_loss),
    "RegNet": LibraryModel("torchvision", of_torchvision("regnet_y_400mf"), image_loss),
}
