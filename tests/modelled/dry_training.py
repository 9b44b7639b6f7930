"""Training steps, with and without tiering, and all that happened on the device: to be compared, dry and real."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ascend_emulator
import torch
from torch import Tensor, nn

from emulator.tests.allocations import allocations, trace
from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT
from llama import SHAPES, Llama, Shape

STEPS, TOKENS = 3, 128


def gpt() -> nn.Module:
    """As in the demo, with shorter sequences."""
    return GPT(layers=8, width=192, heads=6, context=TOKENS).to("npu")


def llama() -> nn.Module:
    with torch.device("npu"):
        return Llama(Shape(layers=4, width=64, heads=4, hidden=192), TOKENS).bfloat16()


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        yield torch.randint(256, (2, TOKENS), generator=generator)


def plain(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for tokens in batches():
        model(tokens.to("npu"), tokens.to("npu")).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def tiered(model: Any) -> None:
    policy = LayerOrderPolicy(2)
    with TieringManager(policy=policy, device="npu", host_bytes="128MiB") as manager:
        optimizer = manager.register_optimizer(torch.optim.AdamW(model.parameters()), bucket_bytes="1MiB")
        offload = manager.offload_context(model.layers, min_bytes="1KiB")
        for tokens in batches():
            pinned = tokens.pin_memory()
            with offload:
                loss = model(pinned.to("npu", non_blocking=True), pinned.to("npu", non_blocking=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()


def scaled(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("npu")
    for tokens in batches():
        loss = model(tokens.to("npu"), tokens.to("npu"))  # autocast frees its casts in an order that is random
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def record(train: Callable[[], object]) -> dict[str, Any]:
    """What a training did on the device, and when: in nanoseconds since it began."""
    torch.manual_seed(0)
    torch.npu.reset_peak_memory_stats()
    before, begin = len(trace()), ascend_emulator.now()

    def since(seconds: float) -> int:
        return round(1e9 * (seconds - begin))

    with ascend_emulator.record_timeline() as spans:
        train()
        torch.npu.synchronize()
    gc.collect()  # what lies in a cycle, as Mamba does
    done = trace()[before:]
    torch.npu.empty_cache()  # segment by segment, in the order of their streams' addresses: another in each run
    return {
        "allocations": allocations(done),
        "peak": torch.npu.max_memory_allocated(),
        "timeline": [(*span[:-2], since(span.start), since(span.end)) for span in spans],
        "now": since(ascend_emulator.now()),
    }


def peak_rss() -> int:
    """Bytes of this process, since it began to run Python."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def large() -> dict[str, Any]:
    """A step over a layer of Llama 2 7B with 32k tokens, whose activations go to 512 GiB of host memory."""
    before = peak_rss()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("npu"):
        model = Llama(Shape(1, *list(vars(SHAPES["7b"]).values())[1:]), 32768)
    tokens = torch.zeros(1, 32768, dtype=torch.int64).to("npu")
    policy = LayerOrderPolicy()
    with TieringManager(policy=policy, device="npu", host_bytes="512GiB") as manager:
        optimizer = manager.register_optimizer(torch.optim.AdamW(model.parameters()))
        with manager.offload_context(model.layers):
            loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        host = manager.stats()["host.used.peak"]
    return {"rss": peak_rss() - before, "device": torch.npu.max_memory_allocated(), "host": host}


if __name__ == "__main__":
    torch.npu.memory._record_memory_history(stacks="python", context=None)
    programs = {"plain": plain, "tiered": tiered, "scaled": scaled}
    models = {"GPT": gpt, "Llama": llama}
    found: dict[str, Any] = {
        f"{how} {what}": record(lambda train=train, model=model: train(model()))  # type: ignore[misc]
        for how, train in programs.items()
        for what, model in models.items()
    }
    if "large" in sys.argv:
        found["large"] = large()
    print(json.dumps(found))
