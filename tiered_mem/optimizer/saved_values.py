"""What optimizers have in states and groups, as JSON has it, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from .bucket import Absent
from .layout import Field, leaf_at, without_gaps
from .layout import Path as Keys
from .saved_index import DTYPES


class ValueEncoder:
    """Makes JSON of values, and notes down the tensors in them, which JSON has by name.

    owner: whose values they are, for errors. sources: the tensors that were noted down, by their names.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.sources: dict[str, Source] = {}

    def encoded(self, name: str, value: Any, fields: Mapping[Keys, Field] | None = None) -> Any:
        """The value as JSON has it.

        name: of the value; those of its tensors begin with it. fields: of the tensors that are away.

        Raises TypeError for what safetensors and JSON do not hold.
        """
        return self._encoded(_Place(name, value, fields or {}), value)

    def _encoded(self, at: _Place, value: Any) -> Any:
        if isinstance(value, torch.Tensor | Absent):
            return {"$tensor": self._noted(at, value)}
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        if isinstance(value, torch.dtype):
            return {"$dtype": dtype_name(value)}
        if type(value) in (list, tuple):
            each = [self._encoded(at.inside(index), one) for index, one in enumerate(value)]
            return each if type(value) is list else {"$tuple": each}
        if isinstance(value, dict) and all(type(key) in (bool, int, str) for key in value):
            pairs = [(key, self._encoded(at.inside(key), one)) for key, one in value.items()]
            plain = all(type(key) is str and not key.startswith("$") for key in value)
            return dict(pairs) if plain else {"$dict": pairs}
        raise self._refusal(at, f"is a {_kind(type(value))}")

    def _noted(self, at: _Place, value: torch.Tensor | Absent) -> str:
        field = at.fields[at.keys] if isinstance(value, Absent) else None
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                raise self._refusal(at, f"is a {_kind(type(value))}, of which the parts would have to be saved")
            like = value
        elif field is not None and field.rebuild is None:
            like = torch.empty_strided(
                field.parts[0].shape, field.parts[0].stride, dtype=field.parts[0].dtype, device="meta"
            )
        else:
            raise self._refusal(at, "consists of several tensors, of which the parts would have to be saved")
        if like.layout is not torch.strided or dtype_name(like.dtype) not in DTYPES:
            raise self._refusal(at, f"is a tensor of {like.dtype}, {like.layout}")
        name = at.name
        while name in self.sources:  # keys may hold dots
            name += "_"
        permuted = not like.is_contiguous() and without_gaps(like)
        self.sources[name] = Source(at.root, at.keys, field, like.nbytes, like.stride() if permuted else None)
        return name

    def _refusal(self, at: _Place, what: str) -> TypeError:
        return TypeError(
            f"{self._owner}: {at.name} {what}. save() takes plain tensors of safetensors' dtypes, numbers, bool, "
            "str, None, and lists, tuples and dictionaries of them: save what state_dict() gives in another way"
        )


class Source(NamedTuple):
    """A tensor that is to be saved: where it is in a value, and its place in a bucket if it is away.

    stride: None for one that is contiguous in the file and afterwards.
    """

    root: Any
    keys: Keys
    field: Field | None
    nbytes: int
    stride: tuple[int, ...] | None

    def read(self, flat: torch.Tensor | None) -> torch.Tensor:
        """The tensor on the CPU, contiguous: a view of the bucket's bytes, or a copy where it cannot be one."""
        found = leaf_at(self.root, self.keys) if self.field is None or flat is None else self.field.of(flat)
        tensor: torch.Tensor = found.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        return tensor


def decoded(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The value of which `ValueEncoder` has made this. tensor: gives those that JSON has by name."""
    if isinstance(value, list):
        return [decoded(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensor(value["$tensor"])
    if "$float" in value:
        return float(value["$float"])
    if "$dtype" in value:
        return getattr(torch, value["$dtype"])
    if "$tuple" in value:
        return tuple(decoded(each, tensor) for each in value["$tuple"])
    return {key: decoded(each, tensor) for key, each in value.get("$dict", value.items())}


def dtype_name(dtype: torch.dtype) -> str:
    """Without "torch."."""
    return str(dtype).removeprefix("torch.")


class _Place(NamedTuple):
    """Where in a value something is. name: of the tensor that may be there."""

    name: str
    root: Any
    fields: Mapping[Keys, Field]
    keys: Keys = ()

    def inside(self, key: Any) -> _Place:
        return self._replace(name=f"{self.name}.{key}", keys=(*self.keys, key))


def _kind(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
