"""The CPU fallback: an operator that libopapi does not serve runs on the CPU, or says that it cannot.

torch_npu registers about 1,900 operators. Those named in `native_ops` keep torch_npu's kernels, which are
asynchronous. Every other one is replaced here by the first of these that it has:

- another operator that computes the same natively, or a formula of other operators;
- the operators that PyTorch builds it from, under autograd too;
- a CPU kernel: the arguments are copied to the CPU, and the results back;
- a NotImplementedError with the operator's name.

Each call that goes to the CPU is logged at debug level by "ascend_emulator.fallback". An operator that torch_npu
does not register at all never comes here: torch_npu itself runs it on the CPU, with a warning, as on hardware.
What the CPU says of a call that it does not take comes with the operator, the dtypes, and that the NPU is emulated.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch_npu  # type: ignore[import-untyped]
from torch._ops import OpOverload
from torch.library import Library
from torch.utils._pytree import tree_leaves, tree_map

from ascend_emulator import formats
from ascend_emulator.attention_formulas import ATTENTION_FACTORIES
from ascend_emulator.calls import device_of, find, npu_kernel, replace, written_arguments
from ascend_emulator.dry import DryRun
from ascend_emulator.formulas import FORMULAS
from ascend_emulator.native_ops import native_operators

_log = logging.getLogger("ascend_emulator.fallback")


def install(dry: DryRun | None) -> None:
    """Replaces what is not native, for the rest of the process. In a dry run that takes the CPU's place."""
    libraries = {
        namespace: Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        for namespace in ("aten", "npu")
    }
    without_kernel = _on_cpu if dry is None else dry.without_kernel
    native_if = _NATIVE_IF | (_NATIVE_IF_SEVERAL_DEVICES if torch_npu.npu.device_count() > 1 else {})
    untouched = native_operators() - native_if.keys()
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key):
            operator = None if name in untouched else find(name)
            kernel = (
                None if operator is None else _replacement(name, operator, key, native_if.get(name), without_kernel)
            )
            if operator is not None and kernel is not None:
                replace(libraries[operator.namespace], operator, kernel, key)
    same = {name: find(same) for name, same in _SAME_AS.items()}
    told = {"npu::get_npu_format": formats.format_of()}
    for key, kernels in (
        ("PrivateUse1", same | FORMULAS | told),
        ("CompositeImplicitAutograd", ATTENTION_FACTORIES),
    ):
        for name, kernel in kernels.items():
            library = libraries[name.partition("::")[0]]
            library.impl(find(name), kernel, key, allow_override=True)  # type: ignore[no-untyped-call]
    if dry is not None:
        dry.install(libraries["aten"])
    # A replacement ends with its Library; torch.library keeps its own permanent ones here.
    torch.library._keep_alive.extend(libraries.values())


def _has_usual_order(self: torch.Tensor, order: float = 2, *args: Any, **kwargs: Any) -> bool:
    return order in (0, 1, 2, 3, float("inf"), float("-inf"))


def _is_without_mask(self: torch.Tensor, indices: list[torch.Tensor | None], *args: Any, **kwargs: Any) -> bool:
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in indices)


def _is_no_double(self: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    return self.dtype != torch.float64


def _forbids_private_formats(*args: Any, **kwargs: Any) -> bool:
    return not formats.allowed()


# Otherwise torch_npu turns to an older interface of CANN that is not emulated, and once that has failed it silently
# drops all later work.
_NATIVE_IF: dict[str, Callable[..., bool]] = {
    "aten::linalg_vector_norm": _has_usual_order,
    "aten::linalg_vector_norm.out": _has_usual_order,
    "aten::index.Tensor": _is_without_mask,
    "aten::index_put": _is_without_mask,
    "aten::index_put_": _is_without_mask,
    "aten::_index_put_impl_": _is_without_mask,
    # These two it computes in float32 or not at all: Ascend devices know no float64 there.
    **dict.fromkeys(("aten::native_layer_norm", "aten::native_layer_norm_backward"), _is_no_double),
    **dict.fromkeys(("aten::upsample_bilinear2d", "aten::upsample_bilinear2d.out"), _is_no_double),
    "aten::_convolution": _forbids_private_formats,
    "aten::convolution": _forbids_private_formats,
    "aten::convolution_backward": _forbids_private_formats,
    "npu::_npu_format_cast": formats.are_plain,
    "npu::npu_format_cast_.acl_format": formats.are_plain,
}

# What is done otherwise, where that is not the CPU's.
_OTHERWISE = {"npu::_npu_format_cast": formats.cast, "npu::npu_format_cast_.acl_format": formats.cast_}


def _is_on_one_device(self: torch.Tensor, src: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    return self.device == src.device or "cpu" in (self.device.type, src.device.type)


# A copy from one NPU to another takes that older interface too. With a single device no copy has to be asked.
_NATIVE_IF_SEVERAL_DEVICES: dict[str, Callable[..., bool]] = {"aten::copy_": _is_on_one_device}

# torch_npu's own gelu does not tell the kernel which approximation is wanted. It registers gelu.out only, which
# PyTorch's gelu calls; hence gelu itself is given a kernel here.
_SAME_AS = {"aten::gelu": "npu::npu_gelu", "aten::gelu_backward": "npu::npu_gelu_backward"}


def _replacement(
    name: str,
    operator: OpOverload,
    key: str,
    is_native: Callable[..., bool] | None,
    without_kernel: Callable[[OpOverload], Callable[..., Any]],
) -> Callable[..., Any] | None:
    if operator._can_decompose():
        return operator.decompose
    if key != "PrivateUse1":
        return None
    has_cpu_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")
    otherwise = _OTHERWISE.get(name) or (without_kernel(operator) if has_cpu_kernel else _refusal(name))
    return otherwise if is_native is None else _choice(operator, is_native, otherwise)


def _choice(
    operator: OpOverload, is_native: Callable[..., bool], otherwise: Callable[..., Any]
) -> Callable[..., Any]:
    native = npu_kernel(operator)

    def run(*args: Any, **kwargs: Any) -> Any:
        return (native if is_native(*args, **kwargs) else otherwise)(*args, **kwargs)

    return run


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"the emulated NPU has no kernel for {name}")

    return refuse


def _on_cpu(operator: OpOverload) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch_npu.npu.is_current_stream_capturing():
            raise NotImplementedError(f"{operator} runs on the CPU here, and no graph can have that captured")
        _log.debug("%s runs on the CPU, and the caller waits for it", operator)
        mirror = _Mirror(device_of((args, kwargs)))
        cpu_args, cpu_kwargs = tree_map(mirror.to_cpu, (args, kwargs))
        with _told_of(operator, (args, kwargs)):
            if torch.Tag.nondeterministic_seeded in operator.tags:
                with _seeded_by_npu(kwargs.pop("generator", None)):
                    cpu_kwargs.pop("generator", None)
                    result = operator(*cpu_args, **cpu_kwargs)
            else:
                result = operator(*cpu_args, **cpu_kwargs)
        for written in written_arguments(operator, args, kwargs):
            mirror.write_back(written)
        return tree_map(mirror.to_npu, result)

    return run


# The first before what it is derived from.
_CPU_ERRORS = (NotImplementedError, RuntimeError, IndexError, TypeError, ValueError)


@contextmanager
def _told_of(operator: OpOverload, arguments: Any) -> Iterator[None]:
    """An error names the CPU's kernel, if anything; this says which operator it was of, and where that runs."""
    try:
        yield
    except _CPU_ERRORS as error:
        tensors = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
        dtypes = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        where = " of ".join(filter(None, (str(operator), ", ".join(dtypes))))
        kind = next(kind for kind in _CPU_ERRORS if isinstance(error, kind))
        raise kind(f"{where}, which the emulated NPU runs on the CPU: {error}") from error


class _Mirror:
    """The CPU copies of one call's NPU tensors. A tensor that is passed twice has one copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, torch.Tensor] = {}
        self._originals: dict[int, torch.Tensor] = {}

    def to_cpu(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor) or value.device.type != "npu":
            return value
        if id(value) not in self._copies:
            copy = value.cpu()
            self._copies[id(value)] = copy
            self._originals[id(copy)] = value
        return self._copies[id(value)]

    def write_back(self, original: torch.Tensor) -> None:
        copy = self._copies.get(id(original))
        if copy is None:
            return
        if original.shape != copy.shape:
            original.resize_(copy.shape)
        original.copy_(copy.to(self._device))

    def to_npu(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        original = self._originals.get(id(value))
        return value.to(self._device) if original is None else original


@contextmanager
def _seeded_by_npu(generator: torch.Generator | None) -> Iterator[None]:
    """Lets the CPU draw random numbers that follow from the NPU's generator, and leaves its own alone."""
    seed = torch.empty((), dtype=torch.int64, device="npu").random_(generator=generator).item()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(seed))
        yield
