"""What is trained most: models, optimizers, and the loop around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from emulator.tests import gpt, vision
from emulator.tests.gpt import GPT
from emulator.tests.llama import Llama
from emulator.tests.vision import ConvNet, ViT

STEPS, BATCHES, BATCH = 3, 2, 4

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(modern=False),
    "gpt_modern": lambda: GPT(modern=True),
    "llama": Llama,
    "llama_complex": lambda: Llama(complex_numbers=True),
    "vit": ViT,
    "convnet": ConvNet,
}

OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], Optimizer]] = {
    "adam_foreach": lambda parameters: Adam(parameters, lr=1e-2, foreach=True),
    "adam_plain": lambda parameters: Adam(parameters, lr=1e-2, foreach=False),
    "adam_fused": lambda parameters: Adam(parameters, lr=1e-2, fused=True),
    "adamw_foreach": lambda parameters: AdamW(parameters, lr=1e-2, foreach=True),
    "adamw_plain": lambda parameters: AdamW(parameters, lr=1e-2, foreach=False),
    "adamw_fused": lambda parameters: AdamW(parameters, lr=1e-2, fused=True),
    "adamw_amsgrad": lambda parameters: AdamW(parameters, lr=1e-2, amsgrad=True),
    "sgd_simple": lambda parameters: SGD(parameters, lr=0.1),
    "sgd_foreach": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd_plain": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "sgd_fused": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adafactor_foreach": lambda parameters: Adafactor(parameters, lr=1e-2, foreach=True),
    "adafactor_plain": lambda parameters: Adafactor(parameters, lr=1e-2, foreach=False),
}

CLIPPING: dict[str, Callable[[Iterator[nn.Parameter]], object]] = {
    "norm": lambda parameters: clip_grad_norm_(parameters, 1.0),
    "largest": lambda parameters: clip_grad_norm_(parameters, 0.1, norm_type=float("inf")),
    "norm_plain": lambda parameters: clip_grad_norm_(parameters, 1.0, foreach=False),
    "value": lambda parameters: clip_grad_value_(parameters, 1e-2),
}


@dataclass
class Trained:
    """On the CPU: the loss of each batch and last that in evaluation, and the model's final state."""

    losses: list[Tensor]
    state: dict[str, Tensor]


def train(
    device: str,
    make_model: Callable[[], nn.Module],
    optimizer: str = "sgd_foreach",
    *,
    dtype: torch.dtype = torch.float32,
    mixed: bool = False,
    clipping: str = "norm",
    seed: int = 0,
) -> Trained:
    """A few steps of two accumulated batches.

    mixed: under autocast to float16, with a GradScaler.
    """
    torch.manual_seed(seed)
    model = make_model().to(dtype).to(device)
    inputs, targets = (each.to(device) for each in batches_for(model, dtype))
    stepper = OPTIMIZERS[optimizer](model.parameters())
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2, enabled=mixed)
    losses = []
    for step in range(STEPS):
        for batch in range(BATCHES):
            with torch.autocast(device, dtype=torch.float16, enabled=mixed):
                loss = model(inputs[step, batch], targets[step, batch])
            scaler.scale(loss / BATCHES).backward()
            losses.append(loss.detach())
        scaler.unscale_(stepper)
        CLIPPING[clipping](model.parameters())
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
    model.eval()
    with torch.no_grad():
        losses.append(model(inputs[0, 0], targets[0, 0]))
    return Trained(
        [loss.cpu() for loss in losses], {name: value.cpu() for name, value in model.state_dict().items()}
    )


def batches_for(model: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The inputs and targets of each batch of each step, on the CPU."""
    shape = STEPS, BATCHES, BATCH
    if isinstance(model, ViT | ConvNet):
        images = torch.randn(*shape, vision.CHANNELS, vision.IMAGE, vision.IMAGE).to(dtype)
        return images, torch.randint(0, vision.CLASSES, shape)
    tokens = torch.randint(0, gpt.VOCABULARY, (2, *shape, gpt.CONTEXT))
    return tokens[0], tokens[1]


# What runs on a device to see which operators each kind of training needs.
TRAINING_SET: dict[str, Callable[[str], Any]] = {
    "GPT: LayerNorm, GELU, attention by softmax": lambda device: train(device, MODELS["gpt"]),
    "GPT: RMSNorm, SwiGLU, fused attention": lambda device: train(device, MODELS["gpt_modern"]),
    "Llama: rotary positions by halves or as complex numbers": lambda device: [
        train(device, MODELS["llama"]),
        train(device, MODELS["llama_complex"]),
    ],
    "ViT, with dropout and checkpointing": lambda device: [
        train(device, partial(ViT, 0.1, reentrant)) for reentrant in (None, False, True)
    ],
    "ConvNet": lambda device: train(device, MODELS["convnet"]),
    "Clipping": lambda device: [train(device, MODELS["convnet"], clipping=clipping) for clipping in CLIPPING],
    "Mixed precision": lambda device: [
        train(device, MODELS[model], mixed=True) for model in ("llama", "vit", "convnet")
    ],
    "Optimizers": lambda device: [train(device, MODELS["convnet"], optimizer) for optimizer in OPTIMIZERS],
}
