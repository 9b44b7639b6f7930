"""Fine-tunes a Llama with Hugging Face's Trainer, plain and with one line more, from one seed."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

sys.path.insert(0, str(Path(__file__).parent))
from devices import emulated, find_device
from training import MIB, Run, same

from tiered_mem.integrations.transformers import TieringCallback


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens, in place of a tokenized text."""

    def __init__(self, rows: int, length: int) -> None:
        self._tokens = torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def train(name: str, kind: str, options: argparse.Namespace, callbacks: list[TrainerCallback]) -> Run:
    """One training, and what it took of the device."""
    run = Run(name)
    device = getattr(torch, kind)
    device.reset_peak_memory_stats()
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=options.width,
            intermediate_size=3 * options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=8,
            use_cache=False,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            optim="adamw_torch",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        )
        rows = Rows(options.batch * options.steps, options.length)
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=callbacks)
        trainer.train()
    run.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    run.weights = {key: weight.cpu() for key, weight in model.state_dict().items()}
    run.peak_device = device.max_memory_allocated()
    del trainer, model
    gc.collect()
    device.empty_cache()
    return run


def main() -> int:
    options = parse()
    console = Console()
    kind = find_device("examples/trainer_llama.py")
    console.print(f"device: {getattr(torch, kind).get_device_name()}{emulated()}")

    plain = train("plain", kind, options, [])
    tiered = train(
        "tiered",
        kind,
        options,
        # This is the line.
        [TieringCallback(optimizer="host", policy="layer-order")],
    )

    table = Table(title=f"Trainer, {options.layers} layers, {options.steps} steps", caption="device: peak MiB")
    for column in ("run", "first loss", "last loss", "device"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for run in (plain, tiered):
        table.add_row(run.name, f"{run.losses[0]:.4f}", f"{run.losses[-1]:.4f}", f"{run.peak_device / MIB:.0f}")
    console.print(table)
    equal = plain.losses == tiered.losses and same(plain.weights, tiered.weights)
    console.print(f"both runs have bit-equal losses and final weights: {'yes' if equal else 'NO'}")
    return 0 if equal and tiered.peak_device < plain.peak_device else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
