"""The only file that uses torch's private names. Each has a plain name here, and all are looked up at once.

To import it raises ImportError where one is missing. Most are aliases and not functions: several are called for
each tensor that is saved, and an alias calls nothing in Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
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
# Used by these names where they are needed, as half of torch's users do.
_OF_TENSORS = ("_base", "_indices", "_version")
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
