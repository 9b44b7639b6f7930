"""What a dry run makes of operators that would need the device's bytes.

An operator without a native kernel has the outputs that PyTorch's meta kernel tells, and is one kernel that moves
the bytes of its tensors. One whose output's shape depends on the bytes is refused by its name. What the host reads
of the device is 0 (the runtime sees to that), or the value that start() was given.
"""

import ctypes
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch_npu  # type: ignore[import-untyped]
from torch._ops import OpOverload
from torch.library import Library
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from ascend_emulator.calls import device_of, find, npu_kernel, replace, written_arguments
from ascend_emulator.routing import Answer, UniformRouting
from ascend_emulator.runtime import runtime


class DryRun:
    """Stands in for the CPU, to which fallback.py sends operators where there are bytes.

    value: what the host is told of the device's numbers. uniform: see UniformRouting; else it is refused.
    """

    def __init__(self, value: float, uniform: bool) -> None:
        self._value = value
        self._routing = UniformRouting() if uniform else None
        # GradScaler's answers to whether a gradient is not finite: 0 whatever the value, or no step would be made.
        self._never: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def without_kernel(self, operator: OpOverload) -> Callable[..., Any]:
        """What runs in place of an operator that has no native kernel."""
        routed = self._routed(operator)

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.Tag.data_dependent_output in operator.tags:
                return self._told(operator, args, kwargs)
            if routed is not None and (result := routed(*args, **kwargs)) is not None:
                _take_time(operator, tree_leaves((args, kwargs)), [result])
                return result
            shapes = _Shapes(device_of((args, kwargs)))
            meta_args, meta_kwargs = tree_map(shapes.to_meta, (args, kwargs))
            if "generator" in meta_kwargs:
                meta_kwargs["generator"] = None
            try:
                result = operator(*meta_args, **meta_kwargs)
            except (NotImplementedError, RuntimeError) as error:
                if isinstance(error, NotImplementedError) or "meta tensor" in str(error):
                    raise NotImplementedError(_refusal(operator)) from error
                raise
            written = list(written_arguments(operator, args, kwargs))
            for tensor in written:
                shapes.resize(tensor)
            outputs = tree_map(shapes.to_npu, result)
            written += [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
            each_once = {id(tensor): tensor for tensor in written}  # what is changed in place is returned as well
            _take_time(operator, tree_leaves((args, kwargs)), list(each_once.values()))
            return outputs

        return run

    def install(self, library: Library) -> None:
        """Takes over what torch_npu would send to the CPU, and what the host reads. library: one for aten."""
        for name in _without_npu_kernel():
            if (operator := find(name)) is not None:
                replace(library, operator, self.without_kernel(operator))
        # Printing a tensor would select from it what is not 0.
        show: Callable[[torch.Tensor, int], str] = torch._tensor_str._tensor_str
        torch._tensor_str._tensor_str = lambda tensor, indent: show(tensor.cpu(), indent)
        _refuse_what_ddp_reads()
        if self._routing is not None:
            self._routing.install(library)
        else:
            replace(library, torch.ops.aten._grouped_mm.default, _refuse_groups)
        if self._value == 0:
            return
        for operator, made in (
            (torch.ops.aten._local_scalar_dense.default, self._item),
            (torch.ops.aten.copy_.default, self._copy),
            (torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default, self._unscale),
        ):
            replace(library, operator, made(npu_kernel(operator)))

    def _routed(self, operator: OpOverload) -> Answer | None:
        if self._routing is None:
            return None
        answers: dict[OpOverload, Answer] = {
            torch.ops.aten.nonzero.default: self._routing.nonzero,
            torch.ops.aten.bincount.default: self._routing.bincount,
        }
        return answers.get(operator)

    def _item(self, native: Callable[..., Any]) -> Callable[..., Any]:
        def item(tensor: torch.Tensor) -> Any:
            native(tensor)  # which waits for it
            return self._number(tensor)

        return item

    def _copy(self, native: Callable[..., Any]) -> Callable[..., Any]:
        def copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            native(to, source, non_blocking)
            if to.device.type == "cpu" and not to.is_pinned():
                to.fill_(self._number(source))
            return to

        return copy

    def _unscale(self, native: Callable[..., Any]) -> Callable[..., Any]:
        def unscale(grads: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
            self._never[found_inf] = True
            native(grads, found_inf, inverse_scale)

        return unscale

    def _number(self, tensor: torch.Tensor) -> Any:
        if tensor.dtype == torch.bool:  # of checks such as isnan(loss).any()
            return False
        value = 0 if tensor in self._never else self._value
        if tensor.dtype.is_complex:
            return complex(value)
        return float(value) if tensor.dtype.is_floating_point else int(value)

    def _told(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator says that looks at numbers and makes no tensor, such as torch.equal."""
        device = device_of((args, kwargs))
        _take_time(operator, tree_leaves((args, kwargs)), [])
        torch_npu.npu.current_stream(device).synchronize()
        if [str(result.type) for result in operator._schema.returns] != ["bool"]:
            raise NotImplementedError(_refusal(operator))
        return False


class _Shapes:
    """One call's tensors without their bytes. A tensor that is passed twice is one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._metas: dict[int, torch.Tensor] = {}
        self._originals: dict[int, torch.Tensor] = {}

    def to_meta(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("meta")
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._metas:
            meta = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
            self._metas[id(value)] = meta
            self._originals[id(meta)] = value
        return self._metas[id(value)]

    def resize(self, original: torch.Tensor) -> None:
        shape = self._metas[id(original)].shape
        if original.shape != shape:
            original.resize_(shape)

    def to_npu(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        original = self._originals.get(id(value))
        return torch.empty_like(value, device=self._device) if original is None else original


def _without_npu_kernel() -> list[str]:
    """The operators of aten that torch_npu does not register, nor PyTorch makes of others: they go to the CPU."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    explicit = "CompositeExplicitAutograd"
    composite = ("CompositeImplicitAutograd", explicit, f"{explicit}NonFunctional")
    return [
        name
        for name in set(torch._C._dispatch_get_all_op_names()).difference(registered)
        if name.startswith("aten::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
        and not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in composite)
    ]


def _refusal(operator: OpOverload) -> str:
    if torch.Tag.dynamic_output_shape in operator.tags:
        return (
            f"{operator}: the shape of its result depends on data, of which a dry run has none (of a mixture of "
            "experts --dry-routing uniform knows more)"
        )
    return f"{operator}: a dry run cannot tell its result, for PyTorch has no meta kernel for it"


def _refuse_what_ddp_reads() -> None:
    """Its ranks compare their models, and agree on buckets, by numbers that each reads back from its device."""
    made = DistributedDataParallel.__init__
    signature = inspect.signature(made)

    def init(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        on_npu = any(parameter.device.type == "npu" for parameter in given["module"].parameters())
        if on_npu and (given.get("init_sync", True) or not given.get("find_unused_parameters", False)):
            raise NotImplementedError(
                "DistributedDataParallel reads what its ranks tell each other, and a dry run has no data; pass "
                "init_sync=False, find_unused_parameters=True, with which it reads nothing"
            )
        made(*args, **kwargs)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def _refuse_groups(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        "aten._grouped_mm.default: the sizes of its groups depend on data, of which a dry run has none; "
        "--dry-routing uniform makes them equal"
    )


def _take_time(operator: OpOverload, read: Iterable[Any], written: list[torch.Tensor]) -> None:
    """Puts a kernel on the current stream that moves the tensors' bytes, and does nothing."""
    device = device_of((list(read), written))
    stream = torch_npu.npu.current_stream(device).npu_stream
    out = sum(map(_bytes_of, written))
    moved = out + sum(_bytes_of(leaf) for leaf in read if isinstance(leaf, torch.Tensor))
    put = runtime().ascend_emulator_put_kernel
    if put(str(operator).encode(), ctypes.c_void_p(stream), ctypes.c_size_t(out), ctypes.c_double(moved)) != 0:
        raise RuntimeError(f"{operator}: the emulated device did not take it")


def _bytes_of(tensor: torch.Tensor) -> int:
    """Of what lies in memory once, an expanded tensor's elements for example, the bytes count once."""
    nbytes = tensor.element_size()
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        nbytes *= size if stride != 0 or size == 0 else 1
    return nbytes
