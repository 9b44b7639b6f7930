"""Steps of small kernels, which take as long as the host needs for the operators that launch them."""

from collections.abc import Callable

import torch
from ascend_emulator import now
from torch_npu import npu  # type: ignore[import-untyped]

from benchmarks.published.lora import LORA_SHAPES, LoraModel
from benchmarks.published.rows import Row


def host_bound_seconds(row: Row) -> float:
    """Of a row's second step."""
    with torch.device("npu"):
        step = _STEPS_OF[row.kind](row)
    step()
    npu.synchronize()
    begin = now()
    step()
    npu.synchronize()
    return now() - begin


def _lora(row: Row) -> Callable[[], None]:
    model = LoraModel(LORA_SHAPES[row.model], row.sequence).bfloat16()
    tokens = torch.zeros(row.micro_batch, row.sequence, dtype=torch.int64)

    def step() -> None:
        loss = model(tokens, tokens)
        (loss / 128).backward()
        loss.item()

    return step


def _toy(row: Row) -> Callable[[], None]:
    """Hugging Face's Qwen2, of two small layers: forward and backward, each waited for."""
    from transformers import Qwen2Config, Qwen2ForCausalLM  # takes long, and only this row needs it

    config = Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = Qwen2ForCausalLM(config).half()
    tokens = torch.arange(row.sequence)[None]
    given = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False}

    def step() -> None:
        model.zero_grad()
        loss = model(**given).loss
        npu.synchronize()
        loss.backward()

    return step


def _mlp(row: Row) -> Callable[[], None]:
    """Three products and two GELUs of 32 rows: forward and backward, each waited for."""
    linear, gelu = torch.nn.Linear, torch.nn.GELU
    model = torch.nn.Sequential(linear(1024, 4096), gelu(), linear(4096, 4096), gelu(), linear(4096, 1024))
    rows = torch.zeros(32, 1024, requires_grad=True)

    def step() -> None:
        total = model(rows).sum()
        npu.synchronize()
        total.backward()
        model.zero_grad()
        rows.grad = None

    return step


_STEPS_OF: dict[str, Callable[[Row], Callable[[], None]]] = {"lora": _lora, "toy": _toy, "mlp": _mlp}
