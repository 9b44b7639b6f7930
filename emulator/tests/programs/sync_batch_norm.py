"""Two ranks with half of a batch each: SyncBatchNorm under DistributedDataParallel, and the whole on the CPU."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("hccl")
rank = dist.get_rank()
torch.npu.set_device(rank)

torch.manual_seed(0)
plain = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
images, targets = torch.randn(8, 3, 8, 8), torch.randint(0, 4, (8,))
model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)).npu()
model = DistributedDataParallel(model, device_ids=[rank])

half = slice(4 * rank, 4 * rank + 4)
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
for _ in range(3):
    loss = nn.functional.cross_entropy(model(images[half].npu()), targets[half].npu())
    loss.backward()
    nn.functional.cross_entropy(plain(images), targets).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
for name, expected in plain.state_dict().items():
    torch.testing.assert_close(model.module.state_dict()[name].cpu(), expected, rtol=1e-4, atol=1e-5)
dist.destroy_process_group()
