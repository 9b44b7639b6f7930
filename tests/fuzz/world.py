"""A program under test, and all that was observed of it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.fuzz.program import Nothing, Program
from tests.fuzz.tiering import Tiered
from tiered_mem.errors import OffloadRefused, TierFull


class World:
    """A program and the managers over it, if any; and all that was observed of it, on the CPU.

    rng: drawn from in the same manner with and without managers.
    """

    def __init__(self, program: Program, tiered: Sequence[Tiered], rng: random.Random) -> None:
        self.program, self.tiered, self.rng = program, tiered, rng
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, *, fail_in: int | None = None) -> Tensor:
        """The loss of the input, in the context of one of the managers."""
        chosen, seed = self.rng.randrange(6), self.rng.randrange(1 << 30)
        torch.manual_seed(seed)
        if not self.tiered:
            return self.program(x, Nothing(), fail_in)
        with contextlib.ExitStack() as stack:
            arounds = [stack.enter_context(each.forward()) for each in self._chosen(chosen)]
            return self.program(x, arounds[-1], fail_in)

    def _chosen(self, number: int) -> list[Tiered]:
        # Of two contexts that are entered together the inner one has it all.
        return list(self.tiered) if number == 0 else [self.tiered[number % len(self.tiered)]]

    def leaves(self, *inputs: Tensor) -> list[Tensor]:
        """All that may have a gradient."""
        return [*self.program.parameters(), *(x for x in inputs if x.requires_grad)]

    def see(self, *tensors: Tensor | None) -> None:
        """Keeps a copy of each."""
        self.seen += [torch.empty(0) if t is None else t.detach().cpu().clone() for t in tensors]

    def take(self, *inputs: Tensor) -> None:
        """Sees the gradients, and takes them away."""
        leaves = self.leaves(*inputs)
        self.see(*(leaf.grad for leaf in leaves))
        self.forget(*inputs)

    def forget(self, *inputs: Tensor) -> None:
        for leaf in self.leaves(*inputs):
            leaf.grad = None

    def step(self, number: int) -> None:
        """A forward and a backward, which must be right whatever was before."""
        x = self.program.input(number)
        loss = self.forward(x)
        loss.backward()
        self.see(loss)
        self.take(x)

    def update(self) -> None:
        """Changes the weights a little, in place."""
        with torch.no_grad():
            for parameter in self.program.parameters():
                parameter.mul_(0.99)

    def phase(self, *, gradients: bool = False) -> None:
        """Takes the weights away and back. Where they cannot leave, nothing has happened."""
        for each in self.tiered[:1]:
            with contextlib.suppress(TierFull, OffloadRefused):
                each.manager.offload(self.program, gradients=gradients)
            each.manager.reload(self.program)
