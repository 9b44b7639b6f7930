"""What is wrong with an optimizer or its parameters, and what to type in its place."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ..device.device import Device
from .layout import Param, contents, spread_of
from .trial import HOOKS, params_of

_log = logging.getLogger("tiered_mem.optimizer")

# What those of torch_npu and of apex for Ascend are known by, which lay all parameters, gradients and states end to
# end. Their gradients must not be others, and of their states none can leave by itself.
_COMBINES = ("is_fused_optimizer", "is_npu_fused_optimizer")


def check_optimizer(optimizer: torch.optim.Optimizer, device: Device) -> None:
    """Raises ValueError, or TypeError, for what cannot be tiered on this device, before anything is changed."""
    name = type(optimizer).__name__
    _check_wraps_none(optimizer, name)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"a torch.optim.Optimizer is needed, and this is a {name}")
    lacking = [each for each in ("param_groups", "state", *HOOKS) if each not in vars(optimizer)]
    if lacking:
        raise ValueError(
            f"{name} has no {lacking[0]!r} of its own, as an optimizer has that called Optimizer.__init__. If it "
            "wraps another optimizer, register that one"
        )
    for option in ("capturable", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise ValueError(
                f"an optimizer with {option}=True cannot be tiered: its states have to stay where they are. "
                f"Make it with {option}=False"
            )
    if any(getattr(optimizer, mark, False) is True for mark in _COMBINES):
        raise ValueError(
            f"{name} lays all its states end to end, where none of them can leave the device: use one of torch's "
            'instead, such as torch.optim.AdamW(..., fused=True) (in transformers optim="adamw_torch_fused")'
        )
    params = params_of(optimizer)
    device.check_some_here(f"the parameters of {name}", params)
    if device.kind != "cpu" and any(param.device.type == "cpu" and spread_of(param) for param in params):
        raise ValueError(
            f"fully_shard(offload_policy=CPUOffloadPolicy()) keeps the states of {name} on the cpu, and "
            "register_optimizer would move the same: leave out one of the two"
        )
    _check_in_use(params, name)


class StepCheck:
    """Looks whether a step has anything to do with what the manager moves.

    device: the manager's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: Device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._begun = self._idle = False

    def look(self, *, has_gradients: bool) -> None:
        """Before a step. has_gradients: they are there already, and do not come of a closure.

        Raises ValueError for parameters that are the model's no more. Says once what makes tiering be of no use.
        """
        params, name = params_of(self._optimizer), type(self._optimizer).__name__
        idle = has_gradients and bool(params) and all(param.grad is None for param in params)
        if idle or not self._begun:
            _check_in_use(params, name)
        if idle and not self._idle:
            self._idle = True
            _log.warning(
                "no parameter of %s has a gradient, and its step changes nothing: was it made for another model, "
                "or before fully_shard put other parameters in their place? Make it afterwards",
                name,
            )
        if params and not self._begun and not any(map(self._device.owns, params)):
            here = self._device.torch_device
            _log.warning(
                "the parameters of %s are on %s, and so are its states, none of which moves: model.to(%r) before "
                "the first step",
                *(name, params[0].device, str(here)),
            )
        self._begun = True


def _check_in_use(params: Sequence[Param], name: str) -> None:
    """Raises ValueError for parameters in whose place FSDP2 has put others, as that of torch 2.13 lets see."""
    gone = sum(hasattr(param, "_fsdp_orig_uid") and spread_of(param) is None for param in params)
    if gone:
        raise ValueError(
            f"{gone} of {len(params)} parameters of {name} are not the model's any more, as fully_shard put others "
            "in their place: make the optimizer after it, as in `fully_shard(model); optimizer = "
            f"manager.register_optimizer({name}(model.parameters()))`"
        )


def _check_wraps_none(optimizer: object, name: str) -> None:
    """Raises ValueError for a wrapper: its states are another optimizer's, which is the one to register."""
    for attribute, value in getattr(optimizer, "__dict__", {}).items():
        if any(isinstance(each, torch.optim.Optimizer) for each in contents(value)):
            inner = f"optimizer.{attribute}"
            raise ValueError(
                f"{name} wraps another optimizer, which has the states: register {inner} and put what comes back "
                f"in its place, as in `{inner} = manager.register_optimizer({inner})`"
            )
