"""What the operators of a layer return: looked at, kept in blocks, and given in place of computing it again."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..device.torch_private import (
    TRILINEAR,
    DispatchMode,
    changes_arguments,
    deeper_autocast,
    less_deep_autocast,
    returns_of,
    storage_id,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from ..errors import NotRepeatable
from .movable import has_storage


class Watch(DispatchMode):
    """Keeps the results of all dear operators in a layer, and looks for what must not be computed again.

    save: None keeps nothing. checkpoint: whether what is saved now goes to a checkpoint inside of the layer.
    settle: called with storages, by their ids, that may be about to change. A copy may read the layer's inputs.
    why: the reason to exclude the layer, if there is one. disturbs: the reason where it has come to other bits
    because it was watched. unwritten: results that hold what was in memory, and that nobody reads.
    """

    def __init__(
        self,
        save: Save | None,
        checkpoint: Callable[[], bool],
        settle: Callable[[Collection[int]], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._save = save
        self._checkpoint = checkpoint
        self._settle = settle
        self._of: list[Seen] = []
        self.kept: dict[int, Result] = {}
        self._saves = 0  # how many tensors autograd has saved so far
        self._saved: set[int] = set()  # their storages, by their ids
        self.why: str | None = None
        self.disturbs: str | None = None
        self.unwritten: list[torch.Tensor] = []
        # Of results that are not kept: the memory, the bytes, and how many tensors were saved before.
        self._returned: list[tuple[Callable[[], torch.UntypedStorage | None], int, int]] = []

    def __enter__(self) -> Any:
        self._autocast, self._deep = _autocast_is_on(), _depth_of_autocast()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func.namespace in _COLLECTIVES:
            self.why = f"it issues a collective itself, {func.name()}"
        elif any(isinstance(each, torch.Generator) for each in (*args, *named.values())):
            self.why = f"{func.name()} draws from a generator of its own, which nobody restores"
        elif self._checkpoint():
            self.why = CHECKPOINT_INSIDE
        if func is TRILINEAR and (self._autocast or _depth_of_autocast() > self._deep):
            self.disturbs = f"autocast casts inside of {TRILINEAR}, but not while it is watched"
        if changes_arguments(func):
            tensors = tensors_among(tree_leaves((args, named)))
            self._settle({storage_id(each.untyped_storage()) for each in tensors if has_storage(each)})
        if not is_dear(func):
            return func(*args, **named)
        devices = {each.device for each in tensors_among(tree_leaves((args, named)))}
        before = _random_states(devices)
        result = func(*args, **named)
        drew = not all(map(torch.equal, before, _random_states(devices)))
        tensors = tensors_among(tree_leaves(result))
        if not drew:
            self.unwritten += _numbers_of_a_draw(func, result)
        if self._save is None:
            if not drew:
                self._returned += [(_memory_of(each), each.nbytes, self._saves) for each in tensors]
            return result
        versions = [(each.detach(), each._version) for each in tensors]
        self.kept[len(self._of)] = Result.of(func, result, self._save)
        self._of.append(Seen(Operation.of(func, args, named), self._saves, drew, versions))
        return result

    def note_save(self, tensor: torch.Tensor) -> None:
        """Autograd saves a tensor."""
        self._saves += 1
        if (storage := _memory_of(tensor)()) is not None:
            self._saved.add(storage_id(storage))

    def would_keep(self) -> tuple[int, int]:
        """The bytes of what was returned that `worth_keeping` would name, and those that autograd has not saved.

        Memory that is gone by now counts with these: so they are the most that they can be. Asked once, at the end.
        """
        returned, self._returned = self._returned, []
        there = [(ref(), nbytes) for ref, nbytes, before in returned if before < self._saves]
        saved, self._saved = self._saved, set()
        unsaved = sum([nbytes for storage, nbytes in there if storage is None or storage_id(storage) not in saved])
        return sum([nbytes for _, nbytes in there]), unsaved

    def worth_keeping(self) -> dict[int, Operation]:
        """The results, by their numbers, that are needed to compute again, and can be kept. Asked once, at the end.

        Not what is the last thing that the layer computes, nor what it changes afterwards. Nor what draws random
        numbers: it has to draw them again, so that what follows draws the same.
        """
        seen, self._of = self._of, []
        return {
            number: each.operation
            for number, each in enumerate(seen)
            if each.saves < self._saves
            and not each.drew
            and all(tensor._version == version for tensor, version in each.versions)
        }


class Operation(NamedTuple):
    """An operator, and what it is called with beside tensors: by that it draws random numbers, or does not."""

    func: Any
    numbers: tuple[object, ...]

    @classmethod
    def of(cls, func: Any, args: Iterable[object], named: Mapping[str, object]) -> Operation:
        return cls(func, tuple(each for each in (*args, *named.values()) if isinstance(each, int | float | str)))


class Seen(NamedTuple):
    """What a trial has seen of a dear operator's result.

    saves: how many tensors autograd had saved before. drew: random numbers. versions: the tensors as they were.
    """

    operation: Operation
    saves: int
    drew: bool
    versions: Sequence[tuple[torch.Tensor, int]]


class KeepResults(DispatchMode):
    """Keeps some results of dear operators: those with these numbers, counted from the layer's beginning.

    One that is called otherwise than in the trial may draw random numbers now, and is computed again.
    """

    def __init__(self, save: Save, wanted: Mapping[int, Operation]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._save = save
        self._wanted = wanted
        self._number = -1
        self.kept: dict[int, Result] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_dear(func):
            self._number += 1
            wanted = self._wanted.get(self._number)
            if wanted is not None and wanted == Operation.of(func, args, kwargs or {}):
                self.kept[self._number] = Result.of(func, result, self._save)
        return result


class GiveResults(DispatchMode):
    """Gives what was kept in place of computing it again."""

    def __init__(self, kept: Mapping[int, Result]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._number = -1

    def __enter__(self) -> Any:
        self._number = -1
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_dear(func):
            self._number += 1
            if (result := self._kept.get(self._number)) is not None:
                if result.func is not func:
                    raise NotRepeatable("a layer", f"it called {result.func.name()} first, and now {func.name()}")
                return result.load()
        return func(*args, **(kwargs or {}))


class Result(NamedTuple):
    """What an operator has returned. Its tensors are blocks. structure: None for one tensor, as it is in most."""

    func: Any
    leaves: Sequence[Any]
    structure: Any

    @classmethod
    def of(cls, func: Any, result: Any, save: Save) -> Result:
        # Detached, as autograd is about to make these very tensors its own: the graph would hold itself.
        if isinstance(result, torch.Tensor):
            return cls(func, (Kept(save(result.detach())),), None)
        leaves, structure = tree_flatten(result)
        kept = [Kept(save(each.detach())) if isinstance(each, torch.Tensor) else each for each in leaves]
        return cls(func, kept, structure)

    def load(self) -> Any:
        """The same again, as often as it is asked for."""
        loaded = [each.saved.load().detach() if isinstance(each, Kept) else each for each in self.leaves]
        return loaded[0] if self.structure is None else tree_unflatten(loaded, self.structure)


class Kept(NamedTuple):
    """A tensor of a result."""

    saved: Loads


class Loads(Protocol):
    """What is made of a tensor to keep it: the tensor again, on the device, for whoever asks."""

    def load(self) -> torch.Tensor: ...


def tensors_among(leaves: Iterable[object]) -> list[torch.Tensor]:
    """The tensors in a flat sequence, in their order."""
    return [each for each in leaves if isinstance(each, torch.Tensor)]


Save = Callable[[torch.Tensor], Loads]
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_dtensor"})
# Products, attention and convolutions, by the names that torch and the backends' packages give them.
_DEAR = re.compile(r"attention|matmul|linear$|convolution|(^|_)conv|(^|_)(mm|bmm|mv|addmm|addbmm|baddbmm|addmv)$")
# By what attention's kernels have drawn for dropout: as aten's operators name what they return.
_DRAWN = frozenset({"philox_offset", "philox_seed", "rng_state", "unused"})
WITHOUT_CHECKPOINT = (
    "Without that (gradient_checkpointing=False in transformers and TRL; docs/frameworks has the others) it is "
    "treated as the policy finds best"
)
CHECKPOINT_INSIDE = f"it has a checkpoint of its own inside. {WITHOUT_CHECKPOINT}"


@functools.cache
def is_dear(func: Any) -> bool:
    """Whether an operator computes for long, for each byte of its result."""
    name = func.name().partition("::")[2].partition(".")[0]
    return "backward" not in name and _DEAR.search(name) is not None


def _memory_of(tensor: torch.Tensor) -> Callable[[], torch.UntypedStorage | None]:
    """Tells it as long as it is there, where the tensor is of one piece of it."""
    if type(tensor) is torch.Tensor and has_storage(tensor):
        return weakref.ref(tensor.untyped_storage())
    return lambda: None


def _numbers_of_a_draw(func: Any, result: Any) -> list[torch.Tensor]:
    """The seed and the offset that attention returns: blank without dropout.

    aten's have these names, and lie where the kernel wants them. torch_npu's have none, and lie on the host.
    """
    results = result if isinstance(result, tuple) else (result,)
    named = [each for each, of in zip(results, returns_of(func), strict=False) if of.name in _DRAWN]
    tensors = tensors_among(tree_leaves(result))
    on_host = [each for each in tensors if each.device.type == "cpu" and each.dtype is torch.int64]
    return tensors_among(named) + (on_host if any(each.device.type != "cpu" for each in tensors) else [])


def _random_states(devices: Iterable[torch.device]) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return states + [torch.get_device_module(each).get_rng_state(each) for each in devices if each.type != "cpu"]


def _autocast_is_on() -> bool:
    """On this thread, for the CPU or the device. Within a dispatch mode it looks as if it was off."""
    device = torch.accelerator.current_accelerator()
    return any(torch.is_autocast_enabled(kind) for kind in {"cpu", "cpu" if device is None else device.type})


def _depth_of_autocast() -> int:
    deep = deeper_autocast() - 1
    less_deep_autocast()
    return deep
