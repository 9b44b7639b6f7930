"""What an optimizer keeps for a parameter: values in a dictionary, and in the dictionaries and lists inside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from typing import Any

# The keys and indices that lead to a value.
Path = tuple[Hashable, ...]


def leaves(state: Any) -> Iterator[tuple[Path, Any]]:
    """Each value that is no dictionary or list, and where it is. A tuple is one value: it cannot be filled."""
    for key, value in list(state.items() if isinstance(state, dict) else enumerate(state)):
        if isinstance(value, dict) or type(value) is list:
            yield from (((key, *path), leaf) for path, leaf in leaves(value))
        else:
            yield (key,), value


def leaf_at(state: Any, path: Path) -> Any:
    """The value at the end of a path; None if the path leads nowhere."""
    for key in path:
        try:
            state = state[key] if not isinstance(state, dict) else dict.__getitem__(state, key)
        except (KeyError, IndexError, TypeError):
            return None
    return state


def put_leaf(state: Any, path: Path, value: Any) -> None:
    """Puts another value at the end of a path that leads somewhere."""
    *way, last = path
    for key in way:
        state = state[key]
    state[last] = value


def contents(value: Any) -> Iterator[Any]:
    """The values in all that Python's own containers have, however deep; keys are none."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple | set | frozenset | deque):
        yield value
        return
    for each in value:
        yield from contents(each)
