"""Checks of what users pass, with one wording for each kind of mistake."""

from __future__ import annotations

from collections.abc import Iterable
from sys import float_info
from typing import TypeVar

T = TypeVar("T")


def whole_number(name: str, value: object, *, at_least: int) -> int:
    """An int that is large enough. Raises TypeError for other types, bools too, and ValueError below."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {_shown(value)}")
    if value < at_least:
        raise ValueError(f"{name} must be {at_least} or more, not {value}")
    return value


def number(name: str, value: object, *, at_least: float) -> float:
    """A finite number that is large enough. Raises TypeError for other types, bools too, and ValueError."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {_shown(value)}")
    if not at_least <= value <= float_info.max:
        raise ValueError(f"{name} must be {at_least:g} or more, and finite, not {_shown(value)}")
    return float(value)


def yes_or_no(name: str, value: object) -> bool:
    """A bool. Raises TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {_shown(value)}")
    return value


def one_of(name: str, value: T, words: Iterable[object]) -> T:
    """One of a few words, or None or False where that is among them. Raises ValueError."""
    known = list(words)
    if not any(type(value) is type(word) and value == word for word in known):
        shown = [f'"{word}"' if isinstance(word, str) else repr(word) for word in known]
        raise ValueError(f"{name} is {', '.join(shown[:-1])} or {shown[-1]}, not {value!r}")
    return value


def instance(name: str, value: object, kind: type[T]) -> T:
    """An object of a class. Raises TypeError."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__qualname__}, not {_shown(value)}")
    return value


def items(name: str, value: Iterable[T]) -> list[T]:
    """What is in a sequence, or in anything else that a loop can go through. Raises TypeError."""
    try:
        each = iter(value)
    except TypeError:
        raise TypeError(f"{name} must be a sequence, not {_shown(value)}") from None
    return list(each)


def with_methods(name: str, value: object, methods: Iterable[str]) -> None:
    """Checks that an object, which is no class, has some methods. Raises TypeError."""
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if isinstance(value, type):
        raise TypeError(
            f"{name} must be an object, and {value.__name__} is a class: call it, {value.__name__}(...)"
        )
    if missing:
        raise TypeError(f"{name} must have the methods {', '.join(methods)}; {_shown(value)} has no {missing[0]}")


def _shown(value: object) -> str:
    """The value where it is short, and its type."""
    text = repr(value)
    kind = type(value).__name__
    return f"the {kind} {text}" if len(text) <= 40 else f"a {kind}"
