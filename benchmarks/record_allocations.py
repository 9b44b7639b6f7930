"""Records what the host pool is asked while the example's GPT trains, tiered, as allocation traces."""

from __future__ import annotations

import gzip
import io
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch

from benchmarks.recorded import RecordedPool
from examples.devices import find_device
from examples.gpt import GPT, batches, standard_library
from tiered_mem import TieringManager
from tiered_mem.allocators import PageableMemory, SlabPool
from tiered_mem.policies import LayerOrderPolicy

STEPS = 60
LAYERS, OFFLOADED, WIDTH, HEADS, CONTEXT = 8, 6, 192, 6, 256


def record(folder: Path) -> list[Path]:
    """Writes traces of the example's shape, of fixed and changing lengths, and of twice its batch. Their files."""
    random = Random(0)
    changing = [random.randint(CONTEXT // 4, CONTEXT) for _ in range(STEPS)]
    runs = {
        "gpt-fixed": (8, STEPS * [CONTEXT]),
        "gpt-changing": (8, changing),
        "gpt-changing-large": (16, changing),
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (batch, lengths) in runs.items():
        trace = trace_of(batch, lengths)
        path = folder / f"{name}.trace.gz"
        path.write_bytes(gzip.compress(trace.encode(), mtime=0))  # the same bytes for the same trace
        written.append(path)
    return written


def trace_of(batch: int, lengths: Sequence[int]) -> str:
    """The trace of a step for each of the lengths, which are in tokens."""
    kind = find_device("-m benchmarks.allocator_replay")
    torch.manual_seed(0)
    model = GPT(layers=LAYERS, width=WIDTH, heads=HEADS, context=CONTEXT).to(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = batches(standard_library(), batch=batch, context=CONTEXT, seed=0)
    trace = io.StringIO()
    memory = PageableMemory()
    pool = SlabPool(memory)
    recorded = RecordedPool(pool, trace)
    policy = LayerOrderPolicy(offload=OFFLOADED)
    with TieringManager(policy=policy, device=kind, host_pool=recorded) as manager:
        offload = manager.offload_context(model.layers)
        for step, (length, (tokens, targets)) in enumerate(zip(lengths, data, strict=False)):
            recorded.mark(f"step {step}")
            with offload:
                loss = model(tokens[:, :length].to(kind), targets[:, :length].to(kind))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
            manager.synchronize()  # the slots of this step are back, at whatever speed the copies ran
    pool.close()
    memory.close()
    return trace.getvalue()
