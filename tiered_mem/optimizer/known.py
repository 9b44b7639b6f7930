"""Which optimizers are known to step each parameter by itself, and which have no states of their own."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .leaves import contents

# Each of them calls a closure once, before all else. LBFGS is the one that does not step parameters by themselves.
_KNOWN = frozenset(
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and f"{kind.__module__}.".startswith("torch.optim.")
    and kind not in (torch.optim.Optimizer, torch.optim.LBFGS)
)


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is one of torch's own that steps each parameter by itself, unless a group is mixed.

    A class derived from it may do anything, and so may a step that somebody put in its place. A scheduler's, which
    only takes note of the call, is none of these.
    """
    step = inspect.unwrap(type(optimizer).step)
    own = vars(optimizer).get("step")
    return (
        type(optimizer) in _KNOWN
        and step.__module__.startswith("torch.optim.")
        and (own is None or inspect.unwrap(own) is step)
    )


def is_mixed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a known optimizer has a group in which what becomes of a parameter depends on the others."""
    return any(_mixed(group, type(optimizer)) for group in optimizer.param_groups)


def _mixed(group: dict[str, Any], kind: type) -> bool:
    params = group["params"]
    if kind is torch.optim.Adafactor and group["eps"][0] is None:
        # The type of the first parameter is that of which all of them take an epsilon.
        return len({param.dtype for param in params}) > 1
    # It is for all together that torch chooses whether to use its kernels for lists, which may round otherwise.
    chosen = group.get("foreach") is not None or group.get("fused")
    return not chosen and len({(type(param), param.device.type) for param in params}) > 1


def check_has_states(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for a wrapper: its states are another optimizer's, which is the one to register."""
    name = type(optimizer).__name__
    for attribute, value in vars(optimizer).items():
        if any(isinstance(each, torch.optim.Optimizer) for each in contents(value)):
            inner = f"optimizer.{attribute}"
            raise ValueError(
                f"{name} wraps another optimizer, which has the states: register {inner} and put what comes back "
                f"in its place, as in `{inner} = manager.register_optimizer({inner})`"
            )
    lacking = [each for each in (*_ITS_OWN, *HOOKS) if each not in vars(optimizer)]
    if lacking:
        raise ValueError(
            f"{name} has no {lacking[0]!r} of its own, as an optimizer has that called Optimizer.__init__. If it "
            "wraps another optimizer, register that one"
        )


HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_ITS_OWN = ("param_groups", "state")
