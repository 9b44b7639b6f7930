"""The errors of tiered_mem. Bad arguments are ValueError; everything else is a TieredMemError."""

from __future__ import annotations

from typing import Any

from .sizes import format_bytes


class TieredMemError(Exception):
    """The base of tiered_mem's own errors."""


class DeviceUnavailable(TieredMemError, RuntimeError):
    """The requested device is not on this machine, or its package is not installed."""


class PinningFailed(TieredMemError, RuntimeError):
    """No host memory could be pinned for the device."""


class DeviceFailed(TieredMemError, RuntimeError):
    """The device, or torch's queue to it, has dropped work after a failure. No later work there can be trusted."""


class TierFull(TieredMemError, MemoryError):
    """A tier has no room.

    Args:
        tier: Its name.
        needed: The bytes that were asked for.
        free: The bytes that are free. They may lie in pieces that are each too small.
        used: The bytes that are in use.
        limit: The most bytes that the tier may take.
        advice: What helps.
    """

    def __init__(self, tier: str, *, needed: int, free: int, used: int, limit: int, advice: str) -> None:
        self.needed, self.free, self.used, self.limit = needed, free, used, limit
        super().__init__(
            f"{tier} tier: needed {format_bytes(needed)}, free {format_bytes(free)}, "
            f"used {format_bytes(used)}, limit {format_bytes(limit)}; {advice}"
        )


class SpillDirRefused(TieredMemError, OSError):
    """The directory for spill files cannot be used, or not safely."""


class CorruptRecord(TieredMemError, OSError):
    """A spill file does not hold what was written to it. None of its bytes were used.

    Args:
        path: The file.
        what: The part of it that is wrong.
        expected: The value that it should have.
        found: The value that it has.
    """

    def __init__(self, path: str, what: str, *, expected: object, found: object) -> None:
        self.path, self.expected, self.found = path, expected, found
        super().__init__(f"{path}: {what}: expected {expected}, found {found}")


class ChangedTensor(TieredMemError, RuntimeError):
    """A tensor was changed in place between its save in forward and its use in backward."""


def changed_tensor(
    tensor: Any, origin: tuple[str, int] | None, saved: int | None = None, now: int | None = None
) -> ChangedTensor:
    """The error for one saved tensor, or what has its dtype and shape. saved, now: its versions, if known."""
    name = "a leaf of the graph" if origin is None else f"output {origin[1]} of {origin[0]}"
    versions = "" if saved is None else f": it is at version {now}, version {saved} was saved"
    return ChangedTensor(
        f"a saved {tensor.dtype} tensor of shape {tuple(tensor.shape)}, {name}, was changed in place between "
        f"forward and backward{versions}. Change a clone of it, or change it after backward"
    )


class NotRepeatable(TieredMemError, RuntimeError):
    """A layer that was to be computed again in backward is one that does other things the second time.

    No gradient was made of the other values, but a backward that ended with this has made some of the others.

    Args:
        layer: Its name.
        why: In words.
    """

    def __init__(self, layer: str, why: str) -> None:
        self.why = why
        super().__init__(
            f"{layer} cannot be computed again in backward: {why}. From now on it keeps what it saves: zero the "
            "gradients and make the step anew. TieringManager(recompute=False) computes nothing again"
        )


class InterruptedStep(TieredMemError, RuntimeError):
    """An optimizer's step, or a load of its states, ended in the middle.

    Some parameters and states are from after it, others from before.

    Args:
        optimizer: Its name.
        stepped: How many buckets were done.
        of: How many buckets there are.
        loading: It was a load, and no step.
        why: In words, where that is known.
    """

    def __init__(self, optimizer: str, stepped: int, of: int, *, loading: bool = False, why: str = "") -> None:
        self.stepped, self.of = stepped, of
        what, done = ("load", "loaded") if loading else ("step", "stepped")
        super().__init__(
            f"a {what} of {optimizer} ended when {stepped} of {of} buckets had been {done}, and maybe a part of "
            f"the next{why and f', as {why}'}: its parameters and states are partly from before. Load the model's "
            "and the optimizer's state from a checkpoint"
        )


class OverlapRefused(TieredMemError, RuntimeError):
    """Something that a step beside backward or forward cannot have. What was asked for was not done."""


class Offloaded(TieredMemError, RuntimeError):
    """A tensor was used whose bytes are not on the device, because its module was offloaded."""


class OffloadRefused(TieredMemError, RuntimeError):
    """Something cannot be offloaded as it is now. Nothing was changed."""


class PolicyError(TieredMemError, RuntimeError):
    """A policy answered with something that is not an action."""


class Reentered(TieredMemError, RuntimeError):
    """The manager was called by code that it was running itself, in the same thread."""


class Closed(TieredMemError, RuntimeError):
    """The manager is closed."""
