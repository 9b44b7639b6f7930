"""Steps of small kernels, which take as long as the host needs to launch them: --host-cpu measures that.

So they are as long as this machine's CPU makes them, times a factor for the published machine's host. A busy
machine's CPU is slower by turns, so each step is measured beside a piece of work that is always the same.
"""

import statistics
import time
from collections.abc import Callable

import torch
from ascend_emulator import now
from torch_npu import npu  # type: ignore[import-untyped]

from published.lora import LORA_SHAPES, LoraModel
from published.rows import Row

_SAMPLES = 20
_LEAST_SECONDS = 0.05  # of a sample
# What the piece of work takes on a quiet machine. The factor for the host makes up for any other value.
_PIECE_SECONDS = 5e-3


def host_bound_seconds(row: Row) -> float:
    """The median step, as long as it would be if the piece of work took what it should."""
    with torch.device("npu"):
        step = _STEPS_OF[row.kind](row)
    _timed(step, 1)
    steps = max(1, round(_LEAST_SECONDS / _timed(step, 1)))
    return _PIECE_SECONDS * statistics.median(_step_over_piece(step, steps) for _ in range(_SAMPLES))


def _step_over_piece(step: Callable[[], None], steps: int) -> float:
    before = _piece()
    seconds = _timed(step, steps)
    return 2 * seconds / (before + _piece())


def _timed(step: Callable[[], None], steps: int) -> float:
    """Modelled seconds of one of some steps."""
    npu.synchronize()
    begin = now()
    for _ in range(steps):
        step()
        npu.synchronize()
    return (now() - begin) / steps


def _piece() -> float:
    """CPU seconds of launching small operators on the CPU, forward and backward."""
    begin = time.thread_time()
    x = torch.ones(8, requires_grad=True)
    for _ in range(100):
        y = x.view(2, 4).transpose(0, 1).mul(2).sum()
        torch.autograd.grad(y, x)
    return time.thread_time() - begin


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
