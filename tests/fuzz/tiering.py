"""The managers and contexts of a case, and what is done with them around a program's layers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.fuzz.again import NOTHING_AGAIN, AgainPlan
from tests.fuzz.policies import ACTIONS
from tests.fuzz.program import Nothing, Program
from tests.models import eventually, is_empty
from tiered_mem import TieringManager
from tiered_mem.policies import Policy


@dataclass(frozen=True)
class ManagerPlan:
    """One manager and its context. arguments: of TieringManager, but for the policy, the device and the folder.

    layered: a LayerContext in place of an OffloadContext. synced: its sync is called. acts: the probability that
    manager.act is called, beside what the policy does, where a layer begins, ends or runs backward. again: what is
    computed again in backward.
    """

    policy: str
    make_policy: Callable[[], Policy] = field(repr=False, compare=False)
    arguments: dict[str, Any]
    disk: dict[str, Any] | None
    min_bytes: int
    layered: bool
    variable_depth: bool
    synced: bool
    acts: float
    again: AgainPlan = NOTHING_AGAIN


def draw_manager(rng: random.Random, policy: str, make_policy: Callable[[], Policy]) -> ManagerPlan:
    """A manager with that policy. policy: how it is made, in words."""
    arguments: dict[str, Any] = {
        "host_bytes": rng.choice((8 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20)),
        "pin": rng.choices((True, "try", False), (6, 1, 1))[0],
        "preallocate": rng.choice((None, True, False)),
        "trace": rng.random() < 0.25,
    }
    disk = {
        "spill_bytes": rng.choice((None, "64KiB", "1MiB", "16MiB")),
        "spill_write_budget": rng.choice((None, None, "32KiB", "1MiB")),
        "spill_checksum": rng.choice((None, "crc32", "none")),
    }
    return ManagerPlan(
        policy,
        make_policy,
        arguments,
        disk if rng.random() < 0.5 else None,
        min_bytes=rng.choice((1, 1, 64, 1 << 10, 8 << 10)),
        layered=rng.random() < 0.3,
        variable_depth=rng.random() < 0.5,
        synced=rng.random() < 0.7,
        acts=rng.choice((0.0, 0.0, 0.0, 0.5)) if policy != "ManualPolicy()" else 0.8,
    )


class Tiered:
    """A manager with a context over the layers of one program. Is what is around the program's layers."""

    def __init__(self, plan: ManagerPlan, program: Program, folder: Path, rng: random.Random) -> None:
        self._plan, self._rng = plan, rng
        self._layers = list(program.layers)
        self.folder = folder
        disk = {} if plan.disk is None else {"spill_dir": folder, **plan.disk}
        arguments = plan.arguments | disk | {"recompute": plan.again.allowed}
        self.manager = TieringManager(policy=plan.make_policy(), device=program.device, **arguments)
        self.context: Any = None
        self._handle: Any = None
        if plan.layered:
            # As many layers as the policy was drawn for.
            self.context = self.manager.layer_context(
                len(self._layers), min_bytes=plan.min_bytes, variable_depth=plan.variable_depth
            )
        elif plan.again.attached:
            self._handle = self.manager.attach(
                program, layers=self._layers, min_bytes=plan.min_bytes, recompute=plan.again.asked
            )
        else:
            self.context = self.manager.offload_context(
                self._layers, min_bytes=plan.min_bytes, recompute=plan.again.asked
            )

    @contextlib.contextmanager
    def forward(self) -> Iterator[Any]:
        """Around a forward: entered here, or by each layer, or by itself. Gives what is around the layers."""
        if self._plan.layered or self._handle is not None:
            yield self
            return
        with self.context:
            yield self

    def layer(self, number: int) -> contextlib.AbstractContextManager[object]:
        self.act()
        return self.context if self._plan.layered else Nothing().layer(number)

    def out(self, output: Tensor) -> Tensor:
        if self._plan.layered and self._plan.synced:
            output = self.context.sync(output)
        if self._plan.acts and output.requires_grad:
            output.register_hook(lambda gradient: self.act())
        self.act()
        return output

    def act(self) -> None:
        """Any actions on the blocks there are, if the case is one that does so."""
        if self._rng.random() < self._plan.acts:
            keys = list(self.manager._store.blocks.by_key) or [0]
            kinds = [self._rng.choice(ACTIONS) for _ in range(self._rng.randint(1, 4))]
            self.manager.act(kind(self._rng.choice(keys)) for kind in kinds)

    def refuses_to_nest(self) -> bool:
        """Whether a context that is entered refuses to be entered again, and goes on as if nothing had been."""
        if self.context is None:
            return True
        with self.context:
            try:
                self.context.__enter__()
            except RuntimeError:
                return True
        return False

    def let_go(self) -> str | None:
        """Forgets the layers and the context. Which layer still has a hook."""
        if self._handle is not None:
            self._handle.remove()
        hooked = [number for number, layer in enumerate(self._layers) if has_hooks(layer)]
        self._layers, self.context, self._handle = [], None, None
        return f"hooks are left on layers {hooked}" if hooked else None

    def left_behind(self) -> str | None:
        """What is still there though everything was dropped. Closes the manager."""
        if self._plan.arguments["trace"]:
            self.manager.export_trace(self.folder / "trace.json")
            (self.folder / "trace.json").unlink()
        self.manager.memory_summary()
        if not eventually(lambda: is_empty(self.manager)):
            current = {name: value for name, value in self.manager.stats().items() if "current" in name}
            return f"left in the manager: {current}"
        self.manager.close()
        files = [str(path) for path in self.folder.rglob("*") if path.is_file()]
        return f"left on disk: {files}" if files else None


def has_hooks(layer: Any) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)
