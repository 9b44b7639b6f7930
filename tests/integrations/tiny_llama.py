"""What frameworks that read files are given: a Llama of four layers with its tokenizer, and rows of words."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 64


def tokenizer() -> PreTrainedTokenizerFast:
    """Its words are the numbers from 0 to 61."""
    words = {name: i for i, name in enumerate(["<pad>", "<eos>", *map(str, range(VOCABULARY - 2))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def model(**more: object) -> LlamaForCausalLM:
    """The same each time. more: of its config."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, pad_token_id=0, eos_token_id=1, **more))


def write_model(folder: Path) -> Path:
    """Returns the folder."""
    tokenizer().save_pretrained(folder)
    model().save_pretrained(folder)
    return folder


def write_messages(path: Path, rows: int, words: int) -> Path:
    """A question of eight words and an answer, in each row. Returns the path."""
    numbers = torch.randint(0, VOCABULARY - 2, (rows, words), generator=torch.Generator().manual_seed(1))
    with path.open("w") as file:
        for row in numbers.tolist():
            said = [" ".join(map(str, each)) for each in (row[:8], row[8:])]
            messages = [
                {"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path
