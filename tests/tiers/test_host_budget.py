"""What a process may take of the host's memory, and what it is told when it asks for more."""

from __future__ import annotations

import re

import pytest

from tiered_mem.tiers.host_budget import HostBytes, HostLimit, host_budget, local_processes

pytestmark = pytest.mark.once(why="it needs no device")

GIB = 1 << 30
RAM = HostLimit(64 * GIB, "the machine's RAM")
CGROUP = HostLimit(48 * GIB, "the cgroup limit /sys/fs/cgroup/job/memory.max")
MEMLOCK = HostLimit(8 * GIB, "RLIMIT_MEMLOCK (ulimit -l)", per_process=True)


@pytest.mark.parametrize("asked", [None, "auto"])
@pytest.mark.parametrize(
    ("limits", "processes", "expected"),
    [
        ([RAM], 1, 32 * GIB),
        ([RAM, CGROUP], 1, 24 * GIB),
        ([CGROUP, RAM], 8, 3 * GIB),
        ([RAM, CGROUP, MEMLOCK], 1, 4 * GIB),
        ([RAM, MEMLOCK, CGROUP], 6, 4 * GIB),
        ([RAM, MEMLOCK, CGROUP], 8, 3 * GIB),  # an eighth of 48 GiB is less than the 8 GiB that each may lock
        ([HostLimit(7, "a")], 3, 1),
    ],
)
def test_without_a_wish_it_is_half_of_the_smallest_share(
    asked: str | None, limits: list[HostLimit], processes: int, expected: int
) -> None:
    assert host_budget(asked, limits=limits, processes=processes) == expected


@pytest.mark.parametrize(
    ("asked", "processes", "expected"),
    [
        (1.0, 1, 48 * GIB),
        (0.25, 1, 12 * GIB),
        (0.25, 8, 3 * GIB // 2),
        (1.0, 7, 48 * GIB // 7),
        (0.5, 7, 24 * GIB // 7),
    ],
)
def test_a_fraction_is_one_of_this_processs_share(asked: float, processes: int, expected: int) -> None:
    assert host_budget(asked, limits=[RAM, CGROUP], processes=processes) == expected


def test_all_of_a_share_that_no_float_can_hold() -> None:
    nbytes = 2**61 - 1
    assert host_budget(1.0, limits=[HostLimit(nbytes, "a")], processes=1) == nbytes


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(1, 1), (4096, 4096), ("6GiB", 6 * GIB), (6 * GIB, 6 * GIB), ("1 B", 1), ("0.5GiB", GIB // 2)],
)
def test_a_number_of_bytes_up_to_the_share(asked: int | str, expected: int) -> None:
    assert host_budget(asked, limits=[RAM, CGROUP], processes=8) == expected


@pytest.mark.parametrize(
    ("asked", "limits", "processes", "message"),
    [
        (
            48 * GIB + 1,
            [RAM, CGROUP],
            1,
            "host_bytes=51539607553 is 48.0 GiB, more than the cgroup limit /sys/fs/cgroup/job/memory.max allows "
            "(48.0 GiB for 1 process). This process can ask for at most 51539607552 bytes (48.0 GiB)",
        ),
        (
            "6.5GiB",
            [RAM, CGROUP],
            8,
            "host_bytes='6.5GiB' is 6.5 GiB, more than the cgroup limit /sys/fs/cgroup/job/memory.max allows "
            "(48.0 GiB for 8 processes together). This process can ask for at most 6442450944 bytes (6.0 GiB)",
        ),
        (
            "65GiB",
            [RAM],
            1,
            "host_bytes='65GiB' is 65.0 GiB, more than the machine's RAM allows (64.0 GiB for 1 process). "
            "This process can ask for at most 68719476736 bytes (64.0 GiB)",
        ),
        (
            "9GiB",
            [RAM, MEMLOCK],
            4,
            "host_bytes='9GiB' is 9.0 GiB, more than RLIMIT_MEMLOCK (ulimit -l) allows "
            "(8.0 GiB for 4 processes each). This process can ask for at most 8589934592 bytes (8.0 GiB)",
        ),
    ],
)
def test_more_than_the_share_is_refused_with_all_the_numbers(
    asked: int | str, limits: list[HostLimit], processes: int, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        host_budget(asked, limits=limits, processes=processes)
    assert str(caught.value) == message


def test_the_most_that_can_be_asked_for_is_granted() -> None:
    with pytest.raises(ValueError, match=r"at most (\d+) bytes") as caught:
        host_budget(1 << 50, limits=[RAM], processes=7)
    most = re.search(r"at most (\d+) bytes", str(caught.value))
    assert most is not None
    assert host_budget(int(most[1]), limits=[RAM], processes=7) == 64 * GIB // 7


@pytest.mark.parametrize(
    "asked", [0.0, -0.0, -0.5, 1.0000001, 2.0, 64e9, float("nan"), float("inf"), float("-inf"), True, False]
)
def test_what_is_neither_bytes_nor_a_fraction_says_what_is_allowed(asked: float) -> None:
    with pytest.raises(ValueError, match=f"host_bytes={asked!r} is not a size") as caught:
        host_budget(asked, limits=[RAM], processes=1)
    for allowed in ("an int of bytes", '"64GiB"', "a float above 0 and up to 1", '"auto"'):
        assert allowed in str(caught.value)


@pytest.mark.parametrize("asked", [0, -1, "0GiB", "-3MiB"])
def test_less_than_a_byte_is_refused(asked: int | str) -> None:
    with pytest.raises(ValueError, match=f"at least 1 byte, not {asked!r}"):
        host_budget(asked, limits=[RAM], processes=1)


@pytest.mark.parametrize("asked", ["plenty", "", "Auto", "50%", "nan"])
def test_a_text_that_is_no_size(asked: str) -> None:
    with pytest.raises(ValueError, match=f"{asked!r} is not a size"):
        host_budget(asked, limits=[RAM], processes=1)


@pytest.mark.parametrize(
    ("asked", "nbytes", "processes"), [(None, 0, 1), ("auto", 7, 4), (1e-3, 999, 1), (1.0, 3, 4)]
)
def test_a_part_of_too_little_is_nothing_and_is_refused(
    asked: float | str | None, nbytes: int, processes: int
) -> None:
    with pytest.raises(ValueError, match=f"less than one byte of what a tiny limit allows \\({nbytes} B for "):
        host_budget(asked, limits=[HostLimit(nbytes, "a tiny limit")], processes=processes)


@pytest.mark.parametrize(("text", "expected"), [(None, 1), ("1", 1), ("8", 8)])
def test_the_processes_of_this_machine(monkeypatch: pytest.MonkeyPatch, text: str | None, expected: int) -> None:
    if text is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    assert local_processes() == expected


@pytest.mark.parametrize("text", ["", "0", "-2", "2.0", "eight", "1_0"])
def test_a_number_of_processes_that_is_none_names_the_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with pytest.raises(ValueError, match=f"LOCAL_WORLD_SIZE='{text}' in the environment is not a positive integer"):
        local_processes()


@pytest.mark.parametrize(
    ("asked", "given", "expected"),
    [(None, 32 * GIB, 8 * GIB), (0.9, 40 * GIB, 0.9 * 8 * GIB), ("16GiB", 32 * GIB, 16 * GIB), (1.0, 0, 48 * GIB)],
)
def test_what_other_managers_may_take_is_not_there(asked: HostBytes, given: int, expected: float) -> None:
    assert host_budget(asked, limits=[RAM, CGROUP], processes=1, given=given) == int(expected)


def test_pages_that_are_locked_are_not_those_of_other_managers() -> None:
    assert host_budget(None, limits=[RAM, MEMLOCK], processes=1, given=32 * GIB) == 4 * GIB


@pytest.mark.parametrize(
    ("asked", "given", "message"),
    [
        (
            "20GiB",
            32 * GIB,
            "host_bytes='20GiB' is 20.0 GiB, more than the cgroup limit /sys/fs/cgroup/job/memory.max allows "
            "(48.0 GiB for 1 process, less 32.0 GiB that other managers of this process may take). This process "
            "can ask for at most 17179869184 bytes (16.0 GiB)",
        ),
        (
            None,
            50 * GIB,
            "host_bytes=None is less than one byte of what the cgroup limit /sys/fs/cgroup/job/memory.max allows "
            "(48.0 GiB for 1 process, less 50.0 GiB that other managers of this process may take). Ask for more, "
            "or raise that limit, or close another manager first",
        ),
    ],
)
def test_what_other_managers_leave_is_told(asked: HostBytes, given: int, message: str) -> None:
    with pytest.raises(ValueError, match="other managers") as caught:
        host_budget(asked, limits=[RAM, CGROUP], processes=1, given=given)
    assert str(caught.value) == message
