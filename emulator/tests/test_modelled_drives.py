"""The modelled drives: when its operations begin and end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.launch import EMULATOR, ROOT, run, write_script
from emulator.tests.timed import SERVER, machine

pytestmark = pytest.mark.once(why="its processes have a schedule of their own")

Said = dict[str, Any]

SCHEDULES = [
    ("--schedule", "eager", "--races"),
    ("--schedule", "late"),
    ("--schedule", "random", "--seed", "1"),
    ("--schedule", "random", "--seed", "2", "--races"),
]
PROGRAMS = """
    import json
    from emulator.tests.driven import PROGRAMS
    from emulator.tests.timed import run_all
    print(json.dumps(run_all(PROGRAMS)))
"""


def run_programs(folder: Path, *options: str) -> dict[str, Said]:
    said: dict[str, Said] = json.loads(output_of(folder, PROGRAMS, *machine(folder), *options))
    return said


def output_of(folder: Path, text: str, *options: str) -> str:
    script = write_script(folder, text)
    done = run(*EMULATOR, *options, script, cwd=folder, pythonpath=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    return run_programs(tmp_path_factory.mktemp("eager"))


def test_an_operation_takes_the_latency_and_its_bytes(said: dict[str, Said]) -> None:
    # 50 of latency and 1000 or 500 of bytes; 1 for the query, which is over before the end, and 30 for the wait.
    assert said["one_each_way"] == {
        "submitted": 0,
        "early": False,
        "written": 1080,
        "read": [[1080, 1630]],
        "spans": [["drive_write", 0, 1050], ["drive_read", 1080, 1630]],
        "streams": [0, 0],
    }


def test_reads_come_before_writes_that_have_not_begun(said: dict[str, Said]) -> None:
    assert said["reads_before_writes"]["times"] == [
        [0, 1050],
        [2150, 3200],
        [1050, 1600],
        [1600, 2150],
        [3200, 4250],
    ]


def test_objects_of_one_number_are_one_drive(said: dict[str, Said]) -> None:
    assert said["objects_of_one_drive"]["times"] == [[0, 1050], [1050, 2100]]


def test_each_drive_has_a_queue_of_its_own(said: dict[str, Said]) -> None:
    two = said["two_drives"]
    assert two["times"] == [[0, 1050], [0, 1050], [1050, 1600]]
    assert [span[0] for span in two["spans"]] == ["drive_write", "drive_write", "drive_read"]


def test_polling_ends(said: dict[str, Said]) -> None:
    assert (said["polling"]["polls"], said["polling"]["now"]) == (1050, 1050)


def test_a_wait_may_have_a_limit(said: dict[str, Said]) -> None:
    # Which costs a query where it is reached, so that whoever waits again and again gets there.
    assert said["waiting_for_some_time"]["waits"] == [[False, 101], [False, 102], [False, 103], [True, 1080]]


def test_what_has_not_begun_can_be_cancelled_and_takes_no_time(said: dict[str, Said]) -> None:
    cancelling = said["cancelling"]
    assert cancelling["cancelled"] == [False, True, False]
    assert cancelling["times"] == [[0, 1050], [1050, 2100]]
    assert cancelling["done"]
    assert not cancelling["too late"]
    assert cancelling["spans"] == [["drive_write", 0, 1050], ["drive_write", 1050, 2100]]


def test_what_nobody_asks_about_takes_its_time(said: dict[str, Said]) -> None:
    assert said["forgetting"]["times"] == [[1050, 2100]]


def test_the_drive_and_the_device_work_side_by_side(said: dict[str, Said]) -> None:
    # 20 to issue, 106 for the copy, 30 for the wait, and 30 for the next.
    beside = said["beside_the_device"]
    assert (beside["joined"], beside["synchronised"], beside["times"]) == (156, 186, [[0, 1050]])


@pytest.mark.parametrize("options", SCHEDULES, ids=" ".join)
def test_the_same_in_each_schedule(tmp_path: Path, said: dict[str, Said], options: tuple[str, ...]) -> None:
    assert run_programs(tmp_path, *options) == said


REFUSAL = """
    import ascend_emulator
    from ascend_emulator.drives import offered_drive
    try:
        ascend_emulator.ModelledDrive()
    except ascend_emulator.EmulatorError as error:
        print(error)
    print(offered_drive())
"""


def test_without_a_clock_or_known_drives_there_is_none(tmp_path: Path) -> None:
    script = write_script(tmp_path, REFUSAL)
    without_drives = machine(tmp_path, SERVER.partition("[drives]")[0])
    for options, message, warnings in (
        ((), "a modelled drive needs modelled time: --clock CHIP (clock=...)", 0),
        (without_drives, "the server's file has no [drives]: name another --server, or add them to one", 1),
    ):
        done = run(*EMULATOR, *options, script, cwd=tmp_path)
        assert done.stdout.splitlines() == [message, "None"]
        assert done.stderr.count("files take the time of this machine") == warnings
    done = run("-c", "from ascend_emulator.drives import offered_drive; print(offered_drive())", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_the_trace_has_a_process_for_each_drive(tmp_path: Path) -> None:
    text = "from emulator.tests.driven import write; write().wait()"
    output_of(tmp_path, text, *machine(tmp_path), "--timeline", "trace.json")
    process, _thread, span = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (process["name"], process["args"]) == ("process_name", {"name": "drive"})
    assert (span["name"], span["pid"], span["ts"], span["dur"]) == ("drive_write", process["pid"], 0, 1050)
    assert span["args"] == {"bytes": 1_000_000}
    text += "; from ascend_emulator import ModelledDrive; ModelledDrive(1).submit(10, read=True).wait()"
    output_of(tmp_path, text, *machine(tmp_path), "--timeline", "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert processes.keys() == {"drive", "drive:1"}
    assert {event["pid"] for event in events if event["ph"] == "X"} == set(processes.values())
