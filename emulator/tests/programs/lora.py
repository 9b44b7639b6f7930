"""peft's LoRA on a small Llama: the adapters learn, and nothing else changes."""

import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore")  # of the libraries
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
)
model = get_peft_model(LlamaForCausalLM(config).npu(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
before = {name: value.detach().clone() for name, value in model.named_parameters()}
tokens = torch.arange(32).reshape(2, 16).npu()
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
losses = []
for _ in range(10):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
assert changed == {name for name in before if "lora_" in name}
assert losses[-1] < losses[0], losses
