"""transformers' Trainer: bfloat16, activation checkpointing, and a run that goes on from a checkpoint."""

import sys
import warnings

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

warnings.simplefilter("ignore")  # of the libraries


def train(steps: int, resume: bool) -> torch.Tensor:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=50,
        use_cache=False,
    )
    data = [{"input_ids": row, "labels": row} for row in torch.arange(64).remainder(50).reshape(8, 8)]
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        per_device_train_batch_size=2,
        max_steps=steps,
        save_steps=2,
        bf16=True,
        gradient_checkpointing=True,
        report_to=[],
        disable_tqdm=True,
    )
    model = LlamaForCausalLM(config)
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    assert next(model.parameters()).device.type == "npu"
    assert trainer.state.global_step == steps
    return torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])


first = train(2, resume=False)
assert not torch.equal(train(4, resume=True), first)
