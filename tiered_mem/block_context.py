"""The context that xtuner, MindSpeed-LLM and MindSpeed-MM enter around each block: change one import."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import TracebackType

import torch
from torch.autograd.graph import saved_tensors_hooks

from .activations.hooks import ForwardPass, Saved, keep
from .activations.untraced import untraced
from .configuration import default_manager
from .manager import TieringManager


class async_save_on_cpu:
    """What a block saves for backward moves as the manager's policy says:

        for i, block in enumerate(blocks):
            with async_save_on_cpu(h2d_stream, d2h_stream, block_idx=i, depth=len(blocks)):
                x = block(x)

    It does nothing where gradients are off.

    Args:
        h2d_stream: Not used. The manager has streams of its own.
        d2h_stream: Not used either.
        block_idx: The block's number. One that is not above the last one begins a new forward.
        depth: How many blocks there are.
        custom_check_fn: Is asked for each tensor, and says False for one that is to stay.
        prefetch: True. When a block comes back is the policy's to say, and False gives a warning.
        group: The blocks of each group are counted apart, where a model has several loops.
        reserve_pin_memory: Need not be given. Host memory is kept in a pool and used again in any case.
        min_bytes: As for TieringManager.offload_context().
        manager: None is the default manager.

    Raises:
        ValueError: block_idx is not below depth, or `TieringManager.layer_context` raises it.
    """

    def __init__(
        self,
        h2d_stream: object = None,
        d2h_stream: object = None,
        block_idx: int = 0,
        depth: int = 1,
        custom_check_fn: Callable[[torch.Tensor], bool] | None = None,
        prefetch: bool = True,
        *,
        group: object = None,
        reserve_pin_memory: bool = True,
        min_bytes: int | str | None = None,
        manager: TieringManager | None = None,
    ) -> None:
        if not 0 <= block_idx < depth:
            raise ValueError(f"block_idx is {block_idx} of depth {depth}: it counts from 0 to {depth - 1}")
        if not prefetch:
            warnings.warn("prefetch=False has no effect: the policy decides", UserWarning, stacklevel=2)
        self._loop = (manager or default_manager())._contexts.of_blocks(group, depth, min_bytes=min_bytes)
        self._block = block_idx
        self._check = custom_check_fn
        self._hooks: saved_tensors_hooks | None = None

    def __enter__(self) -> async_save_on_cpu:
        self._loop.block(self._block)
        self._loop.__enter__()
        forward = self._loop.forward
        if self._check is not None and forward is not None:
            chosen = partial(_pack, forward, self._check)
            self._hooks = saved_tensors_hooks(untraced(chosen), untraced(forward.unpack))
            self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()
        self._loop.__exit__(kind, error, trace)


def _pack(forward: ForwardPass, check: Callable[[torch.Tensor], bool], tensor: torch.Tensor) -> Saved:
    return forward.pack(tensor) if check(tensor) else keep(tensor, None)
