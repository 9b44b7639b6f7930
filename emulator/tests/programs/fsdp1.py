"""FullyShardedDataParallel on two ranks, against the whole batch on the CPU."""

import copy
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

warnings.simplefilter("ignore")  # torch's, of FSDP1 itself
dist.init_process_group("hccl")
rank = dist.get_rank()
torch.npu.set_device(rank)

torch.manual_seed(0)
plain = nn.Sequential(*[nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)])
batch = torch.randn(4, 6, 32)
model = FullyShardedDataParallel(
    copy.deepcopy(plain).npu(), auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}), device_id=rank
)
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
for _ in range(3):
    model(batch[2 * rank : 2 * rank + 2].npu()).square().mean().backward()
    plain(batch).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
with FullyShardedDataParallel.summon_full_params(model):
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-4)
dist.destroy_process_group()
