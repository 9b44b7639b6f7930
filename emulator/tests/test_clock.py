"""Modelled time: when operations begin and end, what calls cost, and that nothing but their order counts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.launch import EMULATOR, ROOT, run, write_script
from emulator.tests.timed import machine

pytestmark = pytest.mark.once(why="its processes have a schedule of their own")

Said = dict[str, Any]

SCRIPT = """
    import json
    from emulator.tests.timed import run_all
    print(json.dumps(run_all()))
"""
OPTIONS = ("--devices", "2")


def run_programs(folder: Path, *options: str) -> dict[str, Said]:
    script = write_script(folder, SCRIPT)
    done = run(*EMULATOR, *machine(folder), *OPTIONS, *options, script, cwd=folder, pythonpath=ROOT)
    assert done.returncode == 0, done.stderr
    said: dict[str, Said] = json.loads(done.stdout)
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    return run_programs(tmp_path_factory.mktemp("eager"))


def test_a_copy_takes_what_the_link_needs_and_a_wait_its_cost(said: dict[str, Said]) -> None:
    # 20 to issue; 6 of latency and 100 or 50 of bytes; 30 for the wait.
    assert said["a_copy_each_way"] == {
        "issued": 20,
        "arrived": 156,
        "spans": [["copy_h2d", 20, 126], ["copy_d2h", 176, 232]],
        "streams": [1, 1],
    }


def test_opposite_directions_slow_each_other(said: dict[str, Said]) -> None:
    # Until 40 the way up has moved 14 us at 10 bytes/ns; then it has 5, and the way down from 46 on 15. That takes
    # 1000 / 15 = 66.667 us, and then 860 - 72.667 * 5 = 496.665 KB are left for the way up, at 10 again.
    assert said["both_ways_at_once"]["spans"] == [["copy_d2h", 40, 112.667], ["copy_h2d", 20, 162.334]]


def test_copies_in_one_direction_come_one_after_the_other(said: dict[str, Said]) -> None:
    assert said["two_copies_one_way"]["spans"] == [["copy_h2d", 20, 126], ["copy_h2d", 126, 232]]


def test_work_within_the_device_takes_its_bytes(said: dict[str, Said]) -> None:
    # 4 of launch; 500 bytes/ns, each read and each write counted.
    assert said["work_on_the_device"]["spans"] == [["memset", 20, 26], ["copy_d2d", 40, 48]]


def test_events_speak_modelled_time(said: dict[str, Said]) -> None:
    events = said["events"]
    assert events["early"] == "aclrtEventElapsedTime: an event has not been reached yet"
    assert events["spans"] == [["copy_h2d", 25, 131]]
    assert (events["elapsed"], events["now"]) == (126, 161)
    assert events["again"] == 162  # a wait for what has passed costs a query


def test_a_replay_costs_the_host_one_launch_and_takes_the_time_of_its_operations(said: dict[str, Said]) -> None:
    replayed = said["replays_of_a_graph"]
    # 4 events at 5 and 3 operations at 20 to capture them, 20 for each replay. Each takes 106 and 56 of copies, the
    # wait 30.
    assert replayed["times"] == [80, 100, 120, 454]
    assert replayed["spans"] == [
        ["memset", 100, 124],
        ["copy_h2d", 100, 206],
        ["copy_d2h", 206, 262],
        ["memset", 262, 286],
        ["copy_h2d", 262, 368],
        ["copy_d2h", 368, 424],
    ]
    main, side = replayed["streams"][1], replayed["streams"][0]
    assert replayed["streams"] == [side, main, main] * 2


def test_a_copy_runs_beside_the_computing_of_two_streams_that_share_an_engine(said: dict[str, Said]) -> None:
    assert said["computing_beside_a_copy"]["spans"] == [
        ["memset", 20, 44],
        ["memset", 60, 84],
        ["copy_h2d", 40, 146],
    ]


def test_a_stream_waits_for_anothers_event_and_holds_nobody_else_up(said: dict[str, Said]) -> None:
    # The second fill is issued at 70, after the one that waits until 126.
    assert said["a_stream_that_waits"]["spans"] == [["memset", 70, 76], ["copy_h2d", 20, 126], ["memset", 126, 132]]


def test_small_operations_are_bound_by_the_host_and_large_ones_by_the_device(said: dict[str, Said]) -> None:
    small = said["many_small_operations"]
    assert small["spans"] == [["memset", 20 * i, 20 * i + 4.001] for i in range(1, 6)]
    assert small["now"] == 134.001
    large = said["few_large_operations"]["spans"]
    assert large == [["memset", 20 + 24 * i, 20 + 24 * (i + 1)] for i in range(3)]


def test_polling_ends_when_modelled_time_is_there_and_the_memory_is_right(said: dict[str, Said]) -> None:
    event = said["polling_an_event"]
    assert (event["polls"], event["now"], event["last byte"]) == (101, 126, 7)
    stream = said["polling_a_stream"]
    assert (stream["polls"], stream["now"]) == (106, 126)


def test_copies_that_the_caller_waits_for(said: dict[str, Said]) -> None:
    # Of pageable memory at half the rate.
    waiting = said["copies_that_wait"]
    assert (waiting["pinned"], waiting["pageable"], waiting["asynchronous"]) == (156, 156 + 256, 156 + 2 * 256)


def test_many_copies_by_one_call_are_issued_once(said: dict[str, Said]) -> None:
    batch = said["many_copies_by_one_call"]
    assert (batch["issued"], batch["waited"]) == (20, 20 + 3 * 106 + 30)
    assert batch["spans"] == [["copy_h2d", 20 + 106 * i, 20 + 106 * (i + 1)] for i in range(3)]


def test_the_rate_can_be_changed_and_is_the_servers_again_and_no_copy_sleeps(said: dict[str, Said]) -> None:
    rate = said["another_rate"]
    assert rate["spans"] == [["copy_h2d", 20, 10_000_026], ["copy_h2d", 10_000_076, 10_000_182]]
    assert not rate["slept"]


def test_a_wait_for_nothing_costs_what_a_wait_costs(said: dict[str, Said]) -> None:
    nothing = said["waits_for_nothing"]
    assert (nothing["stream"], nothing["device"]) == (30, 60)


def test_each_device_has_engines_of_its_own(said: dict[str, Said]) -> None:
    assert said["two_devices"]["spans"] == [
        ["memset", 20, 44],
        ["memset", 60, 84],
        ["copy_h2d", 40, 146],
        ["copy_h2d", 84, 190],
    ]


def test_in_a_random_program_each_operation_begins_as_soon_as_it_may(said: dict[str, Said]) -> None:
    """Behind its issue, its stream and its waits; and if later than all these, when its engine has become free."""
    program = said["whatever"]
    spans: list[list[tuple[str, float, float]]] = [[], [], []]
    for stream, span in zip(program["streams"], program["spans"], strict=True):
        spans[stream - 1].append(span)
    engines: dict[str, list[tuple[float, float]]] = {}
    late = 0
    for stream, operations in enumerate(program["issued"]):
        before = 0.0
        for (name, issued, waits), (span_name, start, end) in zip(operations, spans[stream], strict=True):
            assert name == span_name
            ready = max([issued, before, *(spans[other][count - 1][2] for other, count in waits if count > 0)])
            engines.setdefault(name, []).append((start, end))
            assert start >= ready
            if start > ready:
                late += 1
                assert any(start == each[2] for of_one in spans for each in of_one if each[0] == name)
            before = end
    for served in engines.values():
        served.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(served))
    assert late > 20


@pytest.mark.parametrize(
    "options",
    [
        ("--schedule", "eager", "--races"),
        ("--schedule", "late"),
        ("--schedule", "random", "--seed", "1"),
        ("--schedule", "random", "--seed", "2", "--races"),
    ],
    ids=" ".join,
)
def test_the_same_in_each_schedule(tmp_path: Path, said: dict[str, Said], options: tuple[str, ...]) -> None:
    assert run_programs(tmp_path, *options) == said


RACE = """
    from emulator.tests.timed import ROOM, Bench
    bench = Bench()
    bench.start()
    bench.up(0)
    bench.fill(1, 10)
    bench.acl.copy(1, bench.other + ROOM, bench.host, 10, bench.streams[0])
    bench.join(0)
"""


def test_races_are_found_with_a_clock_and_tell_its_time(tmp_path: Path) -> None:
    script = write_script(tmp_path, RACE)
    done = run(*EMULATOR, *machine(tmp_path), "--races", script, cwd=tmp_path, pythonpath=ROOT)
    assert done.returncode == 66, done.stderr
    first, *_, second = (line for line in done.stderr.splitlines() if "issued at" in line)
    assert first.startswith("race (once): memset on stream 2 writes 10 bytes at ")
    # The device's wait before the start took 30.
    assert first.endswith(", issued at 50.000 us")
    assert second.startswith("copy_h2d on stream 1 writes 10 bytes at ")
    assert second.endswith(", issued at 70.000 us")


VIEWS = """
    import ascend_emulator
    import torch
    x = torch.zeros(8, device="npu")
    torch.npu.synchronize()
    begin = ascend_emulator.now()
    for _ in range(10):
        x.view(2, 4)
    print(round(1e6 * (ascend_emulator.now() - begin)))
"""


@pytest.mark.slow(why="each is a process that imports torch")
@pytest.mark.parametrize(("options", "microseconds"), [((), 0), (("--host-operators",), 30)])
def test_operators_cost_the_host_if_they_are_to(
    tmp_path: Path, options: tuple[str, ...], microseconds: int
) -> None:
    done = run(*EMULATOR, *machine(tmp_path), *options, write_script(tmp_path, VIEWS), cwd=tmp_path)
    assert int(done.stdout) == microseconds, done.stderr
