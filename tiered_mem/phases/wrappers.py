"""What FSDP2 and DistributedDataParallel have of a module's parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

from ..device.torch_private import ShardedGroup, ShardedParameter, sharded_groups
from ..errors import OffloadRefused
from .placeholder import away

_RESET = "call reset_iter_state() of the FSDP2 root first"
_MAKE_ANEW = "make the model anew, as FSDP2 of this torch has no reset_iter_state()"


class Wrappers:
    """The wrappers in a module, and what they keep beside its parameters.

    shards: what FSDP2 has of a parameter, by the id of each tensor that modules may have for it.
    modules: those whose forward has bookkeeping that an error in the middle would leave undone.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.shards: dict[int, ShardedParameter] = {}
        self.modules: list[torch.nn.Module] = []
        self._groups: list[tuple[str, ShardedGroup]] = []
        self._replicated: list[tuple[str, DistributedDataParallel]] = []
        for name, inner in module.named_modules():
            groups = sharded_groups(inner)
            self._groups += [(name or type(inner).__name__, group) for group in groups]
            if isinstance(inner, DistributedDataParallel):
                self._replicated.append((name or type(inner).__name__, inner))
            if groups or isinstance(inner, DistributedDataParallel):
                self.modules.append(inner)
        for _, group in self._groups:
            for shard in group.parameters:
                self.shards |= {id(tensor): shard for tensor in (shard.sharded, *shard.stand_ins)}

    def check(self, *, gradients: bool) -> None:
        """Raises OffloadRefused where a wrapper needs its parameters now, or has gradients of its own."""
        for name, group in self._groups:
            if group.busy:
                can_reset = any(hasattr(each, "reset_iter_state") for each in self.modules)
                raise OffloadRefused(
                    f"{name} cannot be offloaded: its forward or backward under FSDP2 is under way, or ended with "
                    f"an error. After an error {_RESET if can_reset else _MAKE_ANEW}"
                )
            if gradients and group.unreduced:
                raise OffloadRefused(
                    f"the gradients of {name} cannot be offloaded: FSDP2 has not added them up over the ranks yet, "
                    "as with set_requires_gradient_sync(False). Run the last backward first, or offload without "
                    "gradients=True, and they stay"
                )
        for name, wrapper in self._replicated:
            views = (each.grad._base for each in wrapper.module.parameters() if _has_gradient(each))
            if gradients and wrapper.gradient_as_bucket_view and any(base is not None for base in views):
                raise OffloadRefused(
                    f"the gradients of {name} cannot be offloaded: with gradient_as_bucket_view=True they are "
                    "views of DistributedDataParallel's buckets, which stay. Call zero_grad() first, or offload "
                    "without gradients=True"
                )

    def reducers(self) -> Iterator[list[torch.Tensor]]:
        """The parameters that are held by one reducer of DistributedDataParallel, all of them equally often."""
        for _, wrapper in self._replicated:
            yield [
                each
                for name, each in wrapper.module.named_parameters()
                if each.requires_grad and name not in wrapper.parameters_to_ignore
            ]

    def reshard(self) -> None:
        """Frees what FSDP2 has gathered, and makes the current stream wait for what other streams do to shards."""
        for _, group in self._groups:
            group.wait()
            if not all(away(shard.padded) for shard in group.parameters):
                group.reshard()


def _has_gradient(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and away(parameter.grad) is None
