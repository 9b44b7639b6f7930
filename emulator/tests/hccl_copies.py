"""Programs of several ranks that copy to and from the memory of one host. See hccl_clock.py."""

from __future__ import annotations

from typing import Any

from emulator.tests.acl import D2H, H2D
from emulator.tests.hccl_clock import BYTES, Watch, timed
from emulator.tests.ranks import Program, together

LARGE = 100 * BYTES  # 5 ms to the host, where nobody else copies; 10 ms back
DIRECTIONS = {"copy_d2h": D2H, "copy_h2d": H2D}


def copy(watch: Watch, name: str, stream: int = 1, nbytes: int = LARGE) -> None:
    host = watch.rank.acl.malloc_host(LARGE)
    places = (host, watch.other) if name == "copy_d2h" else (watch.other, host)
    watch.rank.acl.copy(DIRECTIONS[name], *places, nbytes, watch.streams[stream])


def meet(watch: Watch, stream: int = 1) -> None:
    watch.reduce(stream, 4)
    watch.join(stream)


@timed
def all_copy(watch: Watch) -> Any:
    """Each meeting tells the ranks that the others copy."""
    for _ in range(3):
        copy(watch, "copy_d2h")
        meet(watch)


@timed
def one_copies(watch: Watch) -> Any:
    """The others only fetch a number."""
    for _ in range(3):
        copy(watch, "copy_d2h", nbytes=4 if watch.rank.number else LARGE)
        meet(watch)


@timed
def others_cease(watch: Watch) -> Any:
    """All copy once; then only rank 0."""
    copy(watch, "copy_d2h")
    meet(watch)
    for _ in range(60):
        if watch.rank.number == 0:
            copy(watch, "copy_d2h")
        meet(watch)


@timed
def each_its_way(watch: Watch) -> Any:
    """Rank 0 copies to the host, the others from it."""
    for _ in range(3):
        copy(watch, "copy_h2d" if watch.rank.number else "copy_d2h")
        meet(watch)


@timed
def both_ways(watch: Watch) -> Any:
    """All copy in both directions at once."""
    for _ in range(3):
        copy(watch, "copy_d2h")
        copy(watch, "copy_h2d", stream=2)
        watch.order(2, 1)
        meet(watch)


@timed
def in_the_middle(watch: Watch) -> Any:
    """Copies begin alone. While they go on it comes out that the others copy too."""
    copy(watch, "copy_d2h")
    for _ in range(50):
        watch.fill(0, 30 * BYTES)
    watch.reduce(0, 4)
    watch.join(0)


PROGRAMS: dict[str, Program] = {
    "all_copy": all_copy,
    "one_copies": one_copies,
    "others_cease": others_cease,
    "each_its_way": each_its_way,
    "both_ways": both_ways,
    "in_the_middle": in_the_middle,
}


def run_all(ranks: int) -> dict[str, Any]:
    return {name: together(ranks, program, HCCL_BUFFSIZE="1") for name, program in PROGRAMS.items()}
