"""HCCL between emulated NPUs, as code below torch calls it: results, mistakes, and ends that come too early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.launch import EMULATOR, ROOT, run, write_script

pytestmark = pytest.mark.once(why="its processes have a schedule of their own")

Said = dict[str, list[Any]]
WAITS = pytest.mark.slow(why="its ranks wait for 16 seconds")

SCRIPT = """
    import json, sys
    from emulator.tests import hccl_programs, hccl_wrong
    which = {
        "right": hccl_programs.run_right,
        "wrong": hccl_wrong.run_wrong,
        "waiting": hccl_wrong.run_waiting,
        "racing": hccl_wrong.run_racing,
    }
    print(json.dumps(which[sys.argv[1]]()))
"""


def run_programs(which: str, folder: Path, *options: str) -> Said:
    script = write_script(folder, SCRIPT)
    done = run(*EMULATOR, "--devices", "4", *options, script, which, cwd=folder, pythonpath=ROOT)
    assert done.returncode == 0, done.stderr
    said: Said = json.loads(done.stdout)
    return said


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Said:
    return run_programs("right", tmp_path_factory.mktemp("right"), "--races")


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Said:
    return run_programs("wrong", tmp_path_factory.mktemp("wrong"))


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Said:
    return run_programs("waiting", tmp_path_factory.mktemp("waiting"))


@pytest.fixture(scope="module")
def racing(tmp_path_factory: pytest.TempPathFactory) -> Said:
    return run_programs("racing", tmp_path_factory.mktemp("racing"), "--races")


def given(rank: int, count: int = 4) -> list[float]:
    return [10 * rank + i for i in range(count)]


def test_each_collective(right: Said) -> None:
    for rank, results in enumerate(right["collectives"]):
        part = slice(2 * rank, 2 * rank + 2)
        assert results[0] == [60 + 4 * i for i in range(4)]  # sum
        assert results[1] == given(3)  # maximum
        assert results[2] == ([60 + 4 * i for i in range(4)] if rank == 2 else [-1] * 4)
        assert results[3] == [each for other in range(4) for each in given(other)]
        assert results[4] == [60 + 4 * i for i in range(8)][part]
        assert results[5] == given(3, 8)[part]
        assert results[6] == [each for other in range(4) for each in given(other, 8)[part]]
        assert results[7] == given(1)
        start = (0, 3, 7, 12)[rank]  # uneven, with gaps at both ends
        uneven = [[*given(other, 20)[start : start + rank + 1], -1] for other in range(4)]
        assert results[8] == [each for row in uneven for each in row]


def test_sums_go_through_the_ranks_in_order_and_round_each_time(right: Said) -> None:
    # ((1e8 + 1) - 1e8) + 0.25 in float32; 256 + 1 + 1 + 1 in bfloat16, which has no 257.
    assert right["order_of_sums"] == [[0.25, "0x4380"]] * 4


def test_integers_overflow_as_they_do_and_float64_is_refused(right: Said) -> None:
    assert right["other_types"] == [[102, 1 << 42, 5]] * 4


def test_sends_and_receives_alone_in_batches_and_in_groups(right: Said) -> None:
    for rank, (one, first, second, third, grouped) in enumerate(right["transfers"]):
        assert one == given(0 if rank == 1 else rank)
        before = (rank - 1) % 4
        assert [first, second, third] == [[100 * before + i, i] for i in range(3)]
        assert grouped == [(rank + 2) % 4]


def test_communicators_live_side_by_side_and_may_be_used_in_any_order(right: Said) -> None:
    for rank, said in enumerate(right["groups"]):
        assert said == [[24], [2 if rank < 2 else 10], 2, [0, 1]]


def test_an_operation_needs_no_host_once_it_is_issued(right: Said) -> None:
    assert right["met_outside"] == [[6]] * 4


def test_large_trays_are_used_again(right: Said) -> None:
    assert right["large"] == [[160, 0, 160]] * 4


@pytest.mark.slow(why="two more runs; the jobs under torchrun have the schedules, too")
@pytest.mark.parametrize("schedule", ["late", "random"])
def test_results_are_the_same_in_each_schedule(schedule: str, right: Said, tmp_path: Path) -> None:
    assert run_programs("right", tmp_path, "--schedule", schedule, "--races") == right


def test_ranks_in_another_order_are_told_what_each_calls(wrong: Said) -> None:
    for said in wrong["out_of_order"]:
        assert "HcclAllReduce of 4 fp32, sum" in said
        assert "HcclBroadcast of 4 fp32, root 0" in said
        assert "all ranks must call the same, in the same order" in said


def test_another_size_is_an_error_on_all_ranks(wrong: Said) -> None:
    for said in wrong["another_size"]:
        assert "HcclAllReduce of 5 fp32" in said
        assert "HcclAllReduce of 4 fp32" in said


@WAITS
def test_a_rank_that_does_not_come_is_named_with_its_last_call(waiting: Said) -> None:
    for said in waiting["not_called"]:
        assert "HcclAllGather of 4 fp32, operation 2" in said
        assert "rank 1 (process " in said
        assert ") was waited for 5 s (HCCL_EXEC_TIMEOUT), which has not called it" in said
        assert "its last call was operation 1, HcclAllReduce of 4 fp32" in said


@WAITS
def test_two_ranks_that_both_send_first_wait_for_each_other(waiting: Said) -> None:
    for said in waiting["both_send_first"]:
        assert "HcclSend or HcclRecv of 4 fp32, operation 1 from rank " in said
        assert "which has called it, but its stream is held up by something before it" in said


def test_the_death_of_a_rank_is_told_at_once(wrong: Said) -> None:
    *survivors, dead = wrong["dies"]
    assert dead == -6
    for said in survivors:
        assert "HcclAllReduce of 4 fp32, sum, operation 2" in said
        assert said.endswith(") is gone")


def test_a_rank_that_has_left_is_not_waited_for(wrong: Said) -> None:
    *others, left = wrong["leaves"]
    assert left == ""
    assert all(said.endswith(") has destroyed the communicator") for said in others)


@WAITS
def test_a_communicator_that_not_all_join_names_who_is_missing(waiting: Said) -> None:
    waited = [said for rank, said in enumerate(waiting["never_comes"]) if rank != 2]
    assert all("rank 2 of 4 has not come within 10 s (HCCL_CONNECT_TIMEOUT)" in said for said in waited)


def test_a_lost_device_ends_it_for_all_ranks(wrong: Said) -> None:
    assert all(said.endswith("the device is lost") for said in wrong["loses_its_device"])


def test_calls_can_be_told_to_fail(wrong: Said) -> None:
    codes = [
        [4, f"{function}: this call was told to fail"] for function in ("HcclAllReduce", "HcclCommInitRootInfo")
    ]
    assert wrong["told_to_fail"] == [[codes, [10, 12, 14, 16]]] * 2


def test_two_ranks_on_one_device_are_refused(wrong: Said) -> None:
    for said in wrong["on_one_device"]:
        assert "ranks 0 and 1 are both on device 0; each needs one of its own" in said
        assert said.count("\n") == 0


def test_a_communicator_takes_device_memory_and_gives_it_back(wrong: Said) -> None:
    assert wrong["memory"] == [[8192, 7992, 8192]] * 2
    for said in wrong["too_little_memory"]:
        assert "a communicator needs 10000 MiB, free are 8192 of 8192 MiB" in said


@pytest.mark.parametrize(
    ("mistake", "pairs"),
    [
        ("the result read elsewhere", [["HcclAllGather", "copy_d2d"]]),
        ("what is given overwritten elsewhere", [["HcclAllGather (reads)", "memset"]]),
        ("what is given written elsewhere", [["memset", "HcclAllReduce (reads)"], ["memset", "HcclAllReduce"]]),
    ],
)
def test_what_another_stream_does_without_waiting_is_a_race(mistake: str, pairs: Any, racing: Said) -> None:
    assert racing[f"{mistake}, not waited for"] == [pairs] * 2
    assert racing[f"{mistake}, waited for"] == [[]] * 2
