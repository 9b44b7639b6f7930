"""The sizes of the models that the rows train."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A decoder. gated: SwiGLU, RMSNorm and rotary positions as in Llama; else GELU, LayerNorm and learned ones."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    feed_forward: int
    vocabulary: int
    gated: bool = True
    attention_bias: bool = False

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


def _gpt(layers: int, hidden: int, heads: int, vocabulary: int) -> Shape:
    return Shape(layers, hidden, heads, heads, 4 * hidden, vocabulary, gated=False)


SHAPES = {
    "gpt2-124m": _gpt(12, 768, 12, 50304),
    "gpt2-350m": _gpt(24, 1024, 16, 50304),
    "gpt2-774m": _gpt(36, 1280, 20, 50304),
    "gpt2-1558m": _gpt(48, 1600, 25, 50304),
    "mpt-125m": _gpt(12, 768, 12, 50368),
    "mpt-350m": _gpt(24, 1024, 16, 50368),
    "mpt-760m": _gpt(24, 1536, 12, 50368),
    "mpt-1b": _gpt(24, 2048, 16, 50368),
    "mpt-3b": _gpt(32, 2560, 20, 50368),
    "mpt-7b": _gpt(32, 4096, 32, 50368),
    "mpt-13b": _gpt(40, 5120, 40, 50368),
    "mpt-30b": _gpt(48, 7168, 56, 50368),
    "llama2-7b": Shape(32, 4096, 32, 32, 11008, 32000),
    "llama3.2-1b": Shape(16, 2048, 32, 8, 8192, 128256),
    "llama3.2-3b": Shape(28, 3072, 24, 8, 8192, 128256),
    "qwen1.5-0.5b": Shape(24, 1024, 16, 16, 2816, 151936, attention_bias=True),
    "qwen1.5-1.8b": Shape(24, 2048, 16, 16, 5504, 151936, attention_bias=True),
    "qwen1.5-4b": Shape(40, 2560, 20, 20, 6912, 151936, attention_bias=True),
    "qwen2-0.5b": Shape(24, 896, 14, 2, 4864, 151936, attention_bias=True),
    "qwen2-1.5b": Shape(28, 1536, 12, 2, 8960, 151936, attention_bias=True),
    "qwen2-7b": Shape(28, 3584, 28, 4, 18944, 152064, attention_bias=True),
    "minicpm-2b": Shape(40, 2304, 36, 36, 5760, 122753),
    "tiny": Shape(2, 64, 4, 2, 128, 256, attention_bias=True),
    "tiny-gpt": _gpt(2, 64, 4, 256),
}
