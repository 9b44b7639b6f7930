"""The only file that uses torch's private names. Each has a plain name here, and all are looked up at once.

To import it raises ImportError where one is missing. Most are aliases and not functions: several are called for
each tensor that is saved, and an alias calls nothing in Python.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any, cast

import torch
import torch.fx
import torch.utils.checkpoint
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

SUPPORTED = "2.9 or later, and 2.13 is tested"

if torch.__version__ < "2.9":
    raise ImportError(f"torch {torch.__version__} is too old for tiered_mem: pip install 'torch>=2.9'")
if torch.__version__ >= "2.16.dev0":
    logging.getLogger("tiered_mem.device").warning(
        "torch %s is newer than any that tiered_mem was tried with, up to 2.15: see docs/versions.md",
        torch.__version__,
    )

Tensors = Callable[[torch.Tensor], Any]


def _missing(name: str) -> ImportError:
    return ImportError(
        f"torch {torch.__version__} has no {name}, which tiered_mem needs: install a torch that is {SUPPORTED}"
    )


def _found(name: str) -> Any:
    """What torch has under a name such as "_C._is_tracing". Raises ImportError."""
    try:
        return attrgetter(name)(torch)
    except AttributeError:
        raise _missing(f"torch.{name}") from None


# The number of the backward that runs on this thread, -1 for none; and what is called when that one ends.
current_backward: Callable[[], int] = _found("_C._current_graph_task_id")
call_after_backward: Callable[[Callable[[], None]], None] = _found(
    "autograd.Variable._execution_engine.queue_callback"
)

# Whether a profiler of torch's looks at this thread.
profiled: Callable[[], bool] = _found("autograd._profiler_enabled")

# It is made of products that autocast would have of bfloat16, and no dispatch mode lets autocast see them.
TRILINEAR: Any = _found("ops.aten._trilinear").default

# Whether an operator changes what it is called with.
_found("ops.aten.add_.Tensor._schema.is_mutable")
changes_arguments: Callable[[Any], bool] = attrgetter("_schema.is_mutable")

# What an operator returns, each with its name or None.
_found("ops.aten.add_.Tensor._schema.returns")
returns_of: Callable[[Any], Sequence[Any]] = attrgetter("_schema.returns")

# The hooks for saved tensors of this thread.
top_saving_hooks: Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None] = _found(
    "_C._autograd._top_saved_tensors_default_hooks"
)
push_saving_hooks: Callable[[Tensors, Callable[[Any], torch.Tensor]], None] = _found(
    "_C._autograd._push_saved_tensors_default_hooks"
)
pop_saving_hooks: Callable[[], None] = _found("_C._autograd._pop_saved_tensors_default_hooks")
saving_hooks_allowed: Callable[[], bool] = _found("_C._autograd._saved_tensors_hooks_is_enabled")
# The functions with which torch.utils.checkpoint saves nothing, by the beginning of their names.
CHECKPOINT_HOOKS = tuple(
    _found(f"utils.checkpoint.{name}").__qualname__ for name in ("_checkpoint_hook", "_recomputation_hook")
)

# torch.utils.checkpoint in two halves, as hooks of a module need it: runs to where the forward begins, and is asked
# on when it has ended. Its arguments: what computes again, whether random states are restored, what makes the
# contexts around the forward and around the second time, what is compared, two switches, and what it computes with.
checkpoint_halves: Callable[..., Generator[None, None, None]] = _found(
    "utils.checkpoint._checkpoint_without_reentrant_generator"
)
CheckpointError: type[RuntimeError] = _found("utils.checkpoint.CheckpointError")
REENTRANT_CHECKPOINT = f"{_found('utils.checkpoint.CheckpointFunction').__name__}Backward"

# The transforms of torch.func, and what follows the Python code of a model.
innermost_transform: Callable[[], object | None] = _found("_C._functorch.peek_interpreter_stack")
is_of_transform: Callable[[torch.Tensor], bool] = _found("_C._functorch.is_functorch_wrapped_tensor")
is_jit_tracing: Callable[[], bool] = _found("_C._is_tracing")
is_fx_tracing: Callable[[], bool]
if hasattr(torch.fx._symbolic_trace, "_get_is_fx_tracing"):  # since torch 2.14
    is_fx_tracing = _found("fx._symbolic_trace._get_is_fx_tracing")
else:
    _found("fx._symbolic_trace._is_fx_tracing_flag")
    is_fx_tracing = partial(getattr, torch.fx._symbolic_trace, "_is_fx_tracing_flag")
_found("autograd.forward_ad._current_level")
forward_mode_level = cast(Callable[[], int], partial(getattr, forward_ad, "_current_level"))

# A number that names a storage while it lives. By it torch tells how many have the storage; and how many a tensor.
_found("UntypedStorage._cdata")
storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
storage_uses: Callable[[int], int] = _found("_C._storage_Use_Count")
tensor_uses: Callable[[torch.Tensor], int] = _found("Tensor._use_count")

# The stream on which this thread issues its work, of the device with this number.
current_stream: Callable[[int], torch.Stream] = _found("_C._accelerator_getStream")

# Within, no mode of dispatch, of torch's functions or of torch.func has a part in what is done.
_no_dispatch_modes: Callable[[], AbstractContextManager[object]] = _found(
    "utils._python_dispatch._disable_current_modes"
)
_no_function_modes: Callable[[], AbstractContextManager[object]] = _found("_C.DisableTorchFunction")
_dispatch_modes: Callable[[], int] = _found("_C._len_torch_dispatch_stack")
_function_modes: Callable[[], int] = _found("_C._len_torch_function_stack")
_no_transforms: Callable[[], AbstractContextManager[object]] = _found("_C._DisableFuncTorch")

# Within, functions treat a tensor's type as if it had no __torch_function__ of its own.
AsPlainTensors: Any = _found("_C.DisableTorchFunctionSubclass")

# How deep in autocast contexts this thread is, one deeper and back again.
deeper_autocast: Callable[[], int] = _found("autocast_increment_nesting")
less_deep_autocast: Callable[[], int] = _found("autocast_decrement_nesting")

tree_leaves: Callable[..., list[Any]] = _found("utils._pytree.tree_leaves")
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = _found("utils._pytree.tree_flatten")
tree_unflatten: Callable[[Iterable[Any], Any], Any] = _found("utils._pytree.tree_unflatten")

# What runs while any module is called.
MODULE_CALL: CodeType = _found("nn.Module._call_impl").__code__

# Where modules and optimizers keep hooks, and what they note of them.
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
MODULE_HOOK_FLAGS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
OPTIMIZER_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
# Marks that torch leaves, and may also not leave: on a step that a scheduler counts, for such a scheduler on the
# optimizer, and on a parameter in whose place FSDP2 has put another.
STEP_COUNTED, STEP_SEEN = "_wrapped_by_lr_sched", "_opt_called"
REPLACED_BY_FSDP = "_fsdp_orig_uid"
# The hooks of a parameter that are called when its gradient is there.
HOOKS_OF_GRADIENTS = "_post_accumulate_grad_hooks"
# Used by these names where they are needed, as half of torch's users do.
_OF_TENSORS = ("_base", "_indices", "_version", HOOKS_OF_GRADIENTS)
_OF_MODULES = ("_buffers", "_modules", "_parameters", *MODULE_HOOKS, *MODULE_HOOK_FLAGS)
_found("_foreach_copy_")
for _kind, _names, _has in (
    ("torch.Tensor", _OF_TENSORS, dir(torch.Tensor)),
    ("torch.nn.Module", _OF_MODULES, vars(torch.nn.Module())),
    ("torch.optim.Optimizer", OPTIMIZER_HOOKS, torch.optim.Optimizer.__annotations__),
):
    for _name in _names:
        if _name not in _has:
            raise _missing(f"{_kind}.{_name}")

# DTensor and FSDP2. To import them takes seconds, and who has such a tensor or module has done it.
_DTENSOR, _FSDP = "torch.distributed.tensor", "torch.distributed.fsdp"


def as_dtensor(tensor: torch.Tensor) -> Any:
    """The tensor, if it is a DTensor; else None."""
    module = sys.modules.get(_DTENSOR)
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def part_here(tensor: torch.Tensor) -> torch.Tensor | None:
    """What this process has of a DTensor: that very tensor, with its memory. None for any other type."""
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        return None
    try:
        return cast(torch.Tensor, dtensor._local_tensor)
    except AttributeError:
        raise _missing("DTensor._local_tensor") from None


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """What FSDP2 has of one parameter.

    sharded: the DTensor, which optimizers have. padded: what other ranks are sent, which is the DTensor's memory
    with zeros behind it. stand_ins: what modules have in its place while it is gathered. gathered: the tensors that
    use what other ranks have sent, which is memory only then; none where a tensor's own type makes it of that.
    """

    sharded: torch.Tensor
    padded: torch.Tensor
    stand_ins: list[torch.Tensor]
    gathered: list[torch.Tensor]

    @classmethod
    def of(cls, parameter: Any) -> ShardedParameter:
        """What is known of an FSDPParam."""
        whole = getattr(parameter, "_unsharded_param", None)  # before the first time there is no such attribute
        others = [whole, getattr(parameter, "_sharded_post_forward_param", None)]
        gathered = [] if parameter._unsharded_inner_tensors else [whole, *parameter.all_gather_outputs]
        return cls(
            parameter.sharded_param,
            parameter._sharded_param_data,
            [each for each in others if each is not None],
            [each for each in gathered if each is not None],
        )


class ShardedGroup:
    """Parameters of a module that FSDP2 gathers together.

    busy: in the middle of a forward or backward. unreduced: there are gradients that have not been added up over
    all ranks.
    """

    def __init__(self, group: Any, events: list[Any]) -> None:
        self._group = group
        self._events = events
        self.parameters = [ShardedParameter.of(each) for each in group.fsdp_params]
        self.busy: bool = group._training_state.name != "IDLE"
        self.unreduced: bool = group._partial_reduce_output is not None or any(
            each.unsharded_accumulated_grad is not None
            or getattr(getattr(each, "_unsharded_param", None), "grad", None) is not None
            for each in group.fsdp_params
        )

    def wait(self) -> None:
        """Makes the current stream wait for gradients that are still added up, and for a step on another stream."""
        for event in self._events:
            self._group.device_handle.current_stream().wait_event(event)

    def reshard(self) -> None:
        """Frees what is gathered. No rank is asked for anything."""
        self._group.wait_for_unshard()  # where unshard(async_op=True) or a prefetch is under way
        self._group.reshard()
        for each in self._group.fsdp_params:
            each._sharded_post_forward_param = each._sharded_post_forward_param_data = None


def sharded_groups(module: torch.nn.Module) -> list[ShardedGroup]:
    """What FSDP2 gathers for this very module, and for none in it; empty for other modules."""
    fsdp = sys.modules.get(_FSDP)
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return []
    try:
        state = cast(Any, module)._get_fsdp_state()
        # Torch has had several groups for a module since 2.12.
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        stepped = state._state_ctx.post_optim_event
        return [
            ShardedGroup(group, [event for event in (group._post_reduce_event, stepped) if event is not None])
            for group in groups
            if group is not None
        ]
    except AttributeError as error:
        raise _missing(f"{error.name} where FSDP2 is looked into") from None


# torch.compile. To import it takes seconds, and where nobody did nothing is compiled.
DYNAMO = "torch._dynamo"
_set_strategy: Callable[[CodeType, Any], None] = _found("_C._dynamo.eval_frame.set_code_exec_strategy")
_Strategy: Any = _found("_C._dynamo.eval_frame._FrameExecStrategy")
_SKIP = _found("_C._dynamo.eval_frame._FrameAction.SKIP")
_DEFAULT = _found("_C._dynamo.eval_frame._FrameAction.DEFAULT")


def compile_not_by_itself(function: Callable[..., Any]) -> None:
    """torch.compile traces the function inside of what it compiles, and never compiles it by itself."""
    _set_strategy(cast(FunctionType, function).__code__, _Strategy(_SKIP, _DEFAULT))


def compile_never(function: Callable[..., Any], why: str) -> None:
    """torch.compile runs the function as it is, with all that it calls. why: is said where it must not."""
    marked = cast(Any, function)
    _set_strategy(marked.__code__, _Strategy(_SKIP, _SKIP))
    marked._torchdynamo_disable = marked._torchdynamo_disable_recursive = True
    marked._torchdynamo_disable_msg = why


_found("nn.Module._compiled_call_impl")


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operator that is called on a tensor while it is entered, and is never traced.

    What torch puts around a subclass to that end calls three functions of Python for each operator.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]
        compile_never(cls.__torch_dispatch__, "tiered_mem looks at operators here")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Inside, nothing but autograd sees what is done: no mode, no transform, no autocast, no inference mode."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for each in (_no_transforms, _no_function_modes, _no_dispatch_modes):
            stack.enter_context(each())
        for kind in [kind for kind in _autocast_kinds() if torch.is_autocast_enabled(kind)]:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def in_mode() -> bool:
    """Whether `outside_of_modes` would make a difference."""
    autocast = any(map(torch.is_autocast_enabled, _autocast_kinds()))
    modes = _dispatch_modes() + _function_modes()
    return autocast or modes > 0 or torch.is_inference_mode_enabled() or innermost_transform() is not None


def _autocast_kinds() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def any_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get(f"{DYNAMO}.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether torch.compile has the module, in its place or around it."""
    around = getattr(sys.modules.get(DYNAMO), "OptimizedModule", None)
    return module._compiled_call_impl is not None or (around is not None and isinstance(module, around))


def npu_format() -> Callable[[torch.Tensor], int]:
    """Tells the format of a tensor's memory, in torch_npu's numbering, once torch_npu is loaded.

    It is what get_npu_format() asks, in a third of its time. Raises ImportError where torch_npu has none.
    """
    try:
        return cast(Callable[[torch.Tensor], int], torch.ops.npu.get_npu_format.default._op)
    except AttributeError:
        raise _missing("torch.ops.npu.get_npu_format.default._op, of torch_npu") from None
