"""A language model of an LSTM, in mixed precision with a gradient scaler."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.lstm = nn.LSTM(16, 32, num_layers=2, batch_first=True)
        self.out = nn.Linear(32, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(self.tokens(tokens))[0])


torch.manual_seed(0)
model = Model().npu()
tokens = torch.arange(40).remainder(20).reshape(2, 20).npu()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("npu")
losses = []
for _ in range(15):
    with torch.autocast("npu", dtype=torch.float16):
        scores = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < 0.8 * losses[0], losses
