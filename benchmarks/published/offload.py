"""Two published offloads of activations, modelled: one that hid, and one that did not.

    python -m ascend_emulator --clock h100 --dry -m benchmarks.published.offload megatron

Prints as JSON the milliseconds of a step and the peak of the device's memory in GB, plain and offloaded.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from ascend_emulator import now
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch_npu import npu  # type: ignore[import-untyped]

from benchmarks.published.kernels import Fused
from benchmarks.published.models import Block, Decoder
from benchmarks.published.shapes import Shape


class Sent:
    """A tensor that was copied to the host."""

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self.host, self.device = host, device
        self.back: Tensor | None = None
        self.returned = npu.Event()
        self.taken = False


class Copies:
    """Copies on a stream for each direction, to pinned buffers that are used again.

    What is sent lives until settle(): computing then waits for the copies, so its memory is free for the next.
    """

    def __init__(self) -> None:
        self._down, self._up = npu.Stream(), npu.Stream()
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self._held: list[Tensor] = []

    def send(self, tensor: Tensor) -> Sent:
        """Behind what is on the current stream now."""
        buffers = self._free.setdefault((tensor.shape, tensor.dtype), [])
        host = buffers.pop() if buffers else torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._down.wait_stream(npu.current_stream())
        with npu.stream(self._down):
            host.copy_(tensor, non_blocking=True)
        self._held.append(tensor)
        return Sent(host, tensor.device)

    def settle(self) -> None:
        npu.current_stream().wait_stream(self._down)
        self._held.clear()

    def fetch(self, sent: Sent) -> None:
        """Begins to copy it back."""
        if sent.back is not None:
            return
        sent.back = torch.empty_like(sent.host, device=sent.device)
        self._up.wait_stream(npu.current_stream())
        with npu.stream(self._up):
            sent.back.copy_(sent.host, non_blocking=True)
        sent.returned.record(self._up)

    def take(self, sent: Sent) -> Tensor:
        """The tensor, behind its copy on the current stream."""
        self.fetch(sent)
        assert sent.back is not None
        npu.current_stream().wait_event(sent.returned)
        if not sent.taken:
            self._free[sent.host.shape, sent.host.dtype].append(sent.host)
        sent.taken = True
        return sent.back


class MegatronInputs:
    """Sends the inputs of all query-key-value products; fetches each one product ahead of its backward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._copies = Copies()
        self._sent: list[Sent] = []
        for block in model.modules():
            if isinstance(block, Block):
                project = block.attention.qkv[0]
                project.forward = self._offloading(project, project.forward)

    def _offloading(self, project: nn.Module, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def offloading(x: Tensor) -> Tensor:
            address = x.data_ptr()  # a graph keeps its hooks, and these would keep x
            with saved_tensors_hooks(lambda saved: self._pack(saved, address), self._unpack):
                return forward(x)

        return offloading

    def _pack(self, saved: Tensor, address: int) -> Tensor | int:
        if saved.data_ptr() != address:
            return saved
        self._copies.settle()
        self._sent.append(self._copies.send(saved))
        return len(self._sent) - 1

    def _unpack(self, kept: Tensor | int) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        back = self._copies.take(self._sent.pop())
        if kept > 0:
            self._copies.fetch(self._sent[-1])
        return back


class MicroBatches:
    """Sends all that a micro batch's forward pass saves, and fetches all of it as its backward pass begins.

    Computing waits for what was sent before more is, so one micro batch's activations are on their way at most.
    """

    def __init__(self, model: nn.Module) -> None:
        self._copies = Copies()
        self._stay = {each.untyped_storage().data_ptr() for each in [*model.parameters(), *model.buffers()]}

    @contextmanager
    def forward(self) -> Iterator[list[Sent]]:
        """Gives the list of what is sent."""
        self._copies.settle()
        sent: list[Sent] = []
        of_storage: dict[int, Sent] = {}
        held: list[Tensor] = []  # until the end, or another tensor would get the same address

        def pack(saved: Tensor) -> Any:
            storage = saved.untyped_storage()
            if storage.data_ptr() in self._stay or saved.device.type != "npu":
                return saved
            if storage.data_ptr() not in of_storage:
                held.append(saved)
                whole = saved.detach().as_strided([storage.nbytes() // saved.itemsize], [1], 0)
                of_storage[storage.data_ptr()] = self._copies.send(whole)
                sent.append(of_storage[storage.data_ptr()])
            return of_storage[storage.data_ptr()], saved.dtype, saved.shape, saved.stride(), saved.storage_offset()

        with saved_tensors_hooks(pack, self._unpack):
            yield sent
        of_storage.clear()  # a graph keeps its hooks
        held.clear()

    def fetch(self, sent: list[Sent]) -> None:
        for each in reversed(sent):
            self._copies.fetch(each)

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        sent, dtype, *form = kept
        return self._copies.take(sent).view(dtype).as_strided(*form)


class Step:
    """What a step of either does: milliseconds, and the device's peak in GB."""

    def timed(self) -> dict[str, float]:
        self._run()
        npu.reset_peak_memory_stats()
        npu.synchronize()
        begin = now()
        self._run()
        npu.synchronize()
        milliseconds = 1e3 * (now() - begin)
        gigabytes = npu.max_memory_allocated() / 1e9
        return {"milliseconds": milliseconds, "gigabytes": gigabytes, "bubble": self._bubble()}

    def _bubble(self) -> float:
        """What waiting for other cards adds, in milliseconds."""
        return 0.0

    def _run(self) -> None:
        raise NotImplementedError


class Megatron(Step):
    """Assumed, for the thread names no model: 36 layers of Llama's kind, width 5120, of 4096 tokens, twice.

    A layer's input then has 40 MiB, all 36 have the 1440 MB of the thread, and two micro batches take its 1.25 s.
    """

    _SHAPE = Shape(36, 5120, 40, 40, 13824, 32000)

    def __init__(self, offloads: bool) -> None:
        with torch.device("npu"):
            self._model = Decoder(self._SHAPE, Fused(), 4096, 4096, False, 36, True, True).bfloat16()
            self._tokens = torch.zeros(1, 4096, dtype=torch.int64)
        if offloads:
            MegatronInputs(self._model)

    def _run(self) -> None:
        for _ in range(2):
            self._model(self._tokens, self._tokens).backward()


class Pipeline(Step):
    """The first of four ranks with two stages each, interleaved: 16 micro batches of 16 x 256 tokens.

    Assumed: float32, which the throughput fits, and stages of eight layers of GPT's kind, width 1536, which have
    the 469.5M parameters of the thread but for an embedding. The other ranks add the bubble: three times a stage's
    forward and backward pass.
    """

    _RANKS, _STAGES, _MICRO_BATCHES = 4, 2, 16
    _SHAPE = Shape(8, 1536, 16, 16, 6144, 1, gated=False)

    def __init__(self, offloads: bool) -> None:
        with torch.device("npu"):
            self._stages = [
                nn.ModuleList(Block(self._SHAPE, Fused(), 256) for _ in range(8)) for _ in range(self._STAGES)
            ]
            self._input = torch.zeros(16, 256, 1536, requires_grad=True)
        self._offload = MicroBatches(nn.ModuleList(self._stages)) if offloads else None
        self._open: dict[tuple[int, int], tuple[Tensor, list[Sent]]] = {}

    def _run(self) -> None:
        """PyTorch's order: so many forward passes first, then one of each in turn, then the rest backward."""
        ahead = (self._STAGES - 1) * self._RANKS + 2 * (self._RANKS - 1)
        total = self._STAGES * self._MICRO_BATCHES
        for turn in range(total + ahead):
            if turn < total:
                self._forward(*self._place(turn))
            if turn >= ahead:
                stage, micro_batch = self._place(turn - ahead)
                self._backward(self._STAGES - 1 - stage, micro_batch)

    def _place(self, turn: int) -> tuple[int, int]:
        turns, stage = turn // (self._RANKS * self._STAGES), turn // self._RANKS % self._STAGES
        return stage, turns * self._RANKS + turn % self._RANKS

    def _forward(self, stage: int, micro_batch: int) -> None:
        offloading: AbstractContextManager[list[Sent]] = nullcontext([])
        if self._offload:
            offloading = self._offload.forward()
        with offloading as sent:
            x = self._input
            for block in self._stages[stage]:
                x = block(x, x, x)
        self._open[stage, micro_batch] = x, sent

    def _backward(self, stage: int, micro_batch: int) -> None:
        x, sent = self._open.pop((stage, micro_batch))
        if self._offload:
            self._offload.fetch(sent)
        x.backward(self._input.detach())

    def _bubble(self) -> float:
        begin = now()
        self._forward(0, 0)
        self._backward(0, 0)
        npu.synchronize()
        return 1e3 * (self._RANKS - 1) * (now() - begin)


def main() -> None:
    case = {"megatron": Megatron, "pipeline": Pipeline}[sys.argv[1]]
    print(json.dumps(case(offloads=sys.argv[2] == "offloaded").timed()))


if __name__ == "__main__":
    main()
