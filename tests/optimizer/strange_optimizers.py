"""Optimizers as other packages have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class WithRate(Optimizer):
    """Has a learning rate, and no other option."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})


class MasterWeights(WithRate):
    """SGD with momentum in float32, for parameters in bfloat16. Its state has a format of its own on disk."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["master"] = param.float()
                    state["momentum"] = torch.zeros_like(state["master"])
                state["momentum"].mul_(0.9).add_(param.grad.float())
                state["master"].sub_(state["momentum"], alpha=group["lr"])
                param.copy_(state["master"])
        return None

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        return {**packed, "format": "master weights"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["format"] != "master weights":
            raise ValueError("another format")
        # torch would cast the states to the parameter's type.
        known = [param for group in self.param_groups for param in group["params"]]
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for number, state in state_dict["state"].items():
            param = known[number]
            self.state[param] = {key: value.to(param.device) for key, value in state.items()}


class OutOfPlace(Optimizer):
    """Makes new tensors in each step, and counts steps in its groups and for itself, in numbers and in a tensor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})
        self.all_steps = 0
        self.decay = torch.ones(())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self.all_steps += 1
        self.decay *= 0.9
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    before = self.state[param].get("mean", torch.zeros_like(param))
                    mean = self.state[param]["mean"] = 0.9 * before + param.grad / group["steps"]
                    param.sub_(mean, alpha=self.decay.item() * group["lr"] / self.all_steps)
        return None


class Counting(WithRate):
    """Counts steps in its groups and for itself, from the first one on, as pytorch_optimizer's do."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self.all_steps = getattr(self, "all_steps", 0) + 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param)).mul_(0.9).add_(param.grad)
                    param.sub_(mean, alpha=group["lr"] / (group["step"] + self.all_steps))
        return None


class Growing(WithRate):
    """Keeps more and more: one more tensor after three steps, and then a larger one."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(param)).mul_(0.9).add_(param.grad)
                if state["step"] > 3:
                    mean = state.setdefault("slow", torch.zeros_like(param)).mul_(0.99).add_(mean)
                if state["step"] > 5:
                    state["history"] = torch.stack([mean] * (state["step"] - 4))
                    mean = state["history"].sum(0)
                param.sub_(mean, alpha=group["lr"])
        return None


class Noisy(WithRate):
    """Draws random numbers for each parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                    param.sub_(mean + torch.randn_like(param), alpha=group["lr"])
        return None


class GlobalNorm(WithRate):
    """Scales by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([param.grad.square().sum() for param in params]).sum().sqrt()
        for param in params:
            param.sub_(param.grad / norm, alpha=0.1)
        return None


class Estimates(Optimizer):
    """Keeps an estimate in its group, which comes of all parameters."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "d": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            group["d"] += sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=0.1)
        return None


class Failing(torch.optim.SGD):
    """Fails when it comes to the parameter that it is told."""

    victim: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        if any(param is self.victim for group in self.param_groups for param in group["params"]):
            raise RuntimeError("out of luck")
        super().step()
        return None


class Decaying(WithRate):
    """Lets the means of parameters without gradient decay, as no optimizer of torch does."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            for param in group["params"]:
                mean = self.state[param].setdefault("mean", torch.zeros_like(param)).mul_(0.9)
                if param.grad is not None:
                    mean.add_(param.grad)
                param.sub_(mean, alpha=group["lr"])
        return None


class Langevin(WithRate):
    """Draws random numbers, from a generator of its own or from torch's. Some parameters get no state."""

    def __init__(self, params: Any, lr: float = 0.1, generator: torch.Generator | None = None) -> None:
        super().__init__(params, lr)
        self.generator = generator

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                mean = param.grad
                if param.ndim != 1:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param)).mul_(0.9).add_(param.grad)
                noise = torch.randn(param.shape, generator=self.generator)
                param.sub_(mean + noise.to(param), alpha=group["lr"])
        return None


class Clipped(torch.optim.AdamW):
    """Clips by the norm of all gradients, where that is large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 10.0)
        return super().step(closure)


class Skipping(torch.optim.SGD):
    """Leaves a step out where any gradient is not finite."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return super().step(closure) if all(bool(grad.isfinite().all()) for grad in grads) else None


class Sharp(torch.optim.SGD):
    """Looks for a step from a place nearby, for which it calls the closure twice."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        self.state[param]["place"] = param.clone()
                        param.add_(param.grad, alpha=0.05)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.copy_(self.state[param].pop("place"))
        super().step()
        return loss


class Flat(WithRate):
    """Keeps all means in one tensor, of which the states are views, and a state that is the parameter itself."""

    flat: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        if self.flat is None:
            self.flat = torch.zeros(sum(param.numel() for param in params), device=params[0].device)
            parts = self.flat.split([param.numel() for param in params])
            for param, part in zip(params, parts, strict=True):
                self.state[param].update(mean=part.view_as(param), master=param.detach(), slow=param.detach() * 0)
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
        self.flat.mul_(0.9).add_(torch.cat([grad.reshape(-1) for grad in grads]))
        for param in params:
            state = self.state[param]
            state["slow"].lerp_(state["mean"], 0.1)
            state["master"].sub_(state["mean"] + state["slow"], alpha=0.1)
        return None


class ScheduleFree(WithRate):
    """Has a place to train at, and another to be looked at, between which it changes outside of steps."""

    training = True

    @torch.no_grad()
    def switch(self, training: bool) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if self.training != training and "other" in self.state[param]:
                    kept = param.clone()
                    param.copy_(self.state[param]["other"])
                    self.state[param]["other"].copy_(kept)
        self.training = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    other = self.state[param].setdefault("other", param.clone())
                    param.sub_(param.grad, alpha=group["lr"])
                    other.lerp_(param, 0.3)
        return None


class Around(Optimizer):
    """Wraps another one, and has nothing itself: as what `Accelerator.prepare` returns."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)
