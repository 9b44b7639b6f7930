"""Fine-tunes a Llama with Hugging Face's Trainer, plain and with one line more, from one seed."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(Path(__file__).parent))
import screen  # says what is missing, before torch does
import torch
from training import Run, same

try:
    import accelerate  # noqa: F401  the Trainer needs it
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}; install what the examples need: pip install 'tiered_mem[examples]'")

from tiered_mem.integrations.transformers import TieringCallback

GIB = 1 << 30


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens, in place of a tokenized text."""

    def __init__(self, rows: int, length: int) -> None:
        self._tokens = torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


class Clock(TrainerCallback):
    """Times each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._began = time.perf_counter()

    def on_log(self, *_: object, logs: dict[str, float], **__: object) -> None:
        if "loss" in logs:  # the host has it, so that the device is through with the step
            self.seconds.append(time.perf_counter() - self._began)


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
        clock = Clock()
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[*callbacks, clock])
        trainer.train()
    run.seconds = clock.seconds
    run.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    run.peak_host = int(max(entry.get("tiered/host_peak_gib", 0) for entry in trainer.state.log_history) * GIB)
    run.weights = {key: weight.cpu() for key, weight in model.state_dict().items()}
    run.peak_device = device.max_memory_allocated()
    del trainer, model
    gc.collect()
    device.empty_cache()
    return run


def main() -> int:
    options = parse()
    shown = screen.Screen("examples/trainer_llama.py")
    kind = shown.kind

    plain = train("plain", kind, options, [])
    tiered = train(
        "tiered",
        kind,
        options,
        # This is the line.
        [TieringCallback(optimizer="host", policy="layer-order")],
    )

    shown.table([plain, tiered])
    shown.overhead('activations of all layers but the last leave and come back; policy="auto" moves what it must')
    equal = plain.losses == tiered.losses and same(plain.weights, tiered.weights)
    shown.verdict("both runs have bit-equal losses and final weights", right=equal)
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
