"""Why a step cannot be run in less memory, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

from ...sizes import format_bytes
from .bound import BudgetTooSmall
from .names import Name, spoken
from .profile import Profile
from .share import StatesShare


def explained(
    error: BudgetTooSmall, profile: Profile, names: Sequence[Name], states: StatesShare | None = None
) -> BudgetTooSmall:
    """The same error in the words of the step, and with what would help, the largest part first.

    states: of the optimizers that are registered, where that is known.
    """
    end = len(names)
    k = next((k for k in range(error.position, end) if profile.unmovable[k] >= error.unmovable), error.position)
    standing = profile.standing[k] if profile.standing else 0
    before = min(standing, profile.standing[0] if profile.standing else 0)
    passing = error.unmovable - standing
    in_use = error.floor - error.unmovable
    over = error.floor - error.budget
    if all(used <= k for used in profile.used):
        where = "what follows the backward, as a rule the optimizer's step"
        step = f"the optimizer step takes {format_bytes(error.floor)}"
        helps = [(error.floor, f"{step}: {_of_the_step(states)}")]
    else:
        where = spoken(names[k])
        helps = [
            (passing + in_use, f"smaller microbatches: {format_bytes(passing + in_use)} are for this alone"),
        ]
        if states is None or not states.registered:
            helps.append(
                (before, "register the optimizer, so that its states are on the host (register_optimizer)")
            )
        layers, less = _checkpointed(profile, names, k, over)
        if layers:
            helps.append((standing - before, f"checkpoint {layers}: {format_bytes(less)} less, or lower min_bytes"))
    parts = (
        f"{where}, {format_bytes(before)} are from before the step, {format_bytes(standing - before)} have come in "
        f"it and cannot leave, {format_bytes(passing)} come and go, and {format_bytes(in_use)} are saved and in use"
    )
    told = [text for part, text in sorted(helps, reverse=True) if part > 0]
    return BudgetTooSmall(error.budget, error.floor, error.position, error.unmovable, parts, told)


def _of_the_step(states: StatesShare | None) -> str:
    if states is None or not states.registered:
        return "register the optimizer, with small bucket_bytes"
    if states.at_once:
        return "register it with separable=True, if it steps each parameter by itself, and with small bucket_bytes"
    return "register the optimizer with smaller bucket_bytes"


def _checkpointed(profile: Profile, names: Sequence[Name], k: int, over: int) -> tuple[str, int]:
    """The last layers that have kept so many bytes at a position, or all that have any, and their bytes.

    What a layer keeps beside its blocks is too small for one, or cannot leave. A checkpoint does not save it.
    """
    if not profile.standing:
        return "", 0
    begun: dict[tuple[int, int], int] = {}
    kept: dict[tuple[int, int], int] = {}
    for name, bytes_now in zip(names[: k + 1], profile.standing, strict=False):
        match name:
            case "forward", graph, layer, _:
                begun.setdefault((graph, layer), bytes_now)
            case "end", graph, layer, _ if (graph, layer) in begun:
                kept[graph, layer] = bytes_now - begun[graph, layer]
            case "backward", graph, layer, _:
                kept.pop((graph, layer), None)
    chosen: set[int] = set()
    less = 0
    for (_, layer), nbytes in sorted(kept.items(), key=lambda item: item[0][1], reverse=True):
        if less >= over and layer not in chosen:
            break
        if nbytes > 0:
            chosen.add(layer)
            less += nbytes
    if not chosen:
        return "", 0
    first, last = min(chosen), max(chosen)
    return f"layer {last}" if first == last else f"layers {first} to {last}", less
