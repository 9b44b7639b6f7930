"""HCCL in modelled time: ranks meet, whatever their processes do, and two runs tell the same nanoseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.launch import EMULATOR, ROOT, run, write_script
from emulator.tests.timed import machine

pytestmark = pytest.mark.once(why="its processes have a schedule of their own")

Said = dict[str, list[Any]]

SCRIPT = """
    import json
    from emulator.tests.hccl_clock import run_all
    print(json.dumps(run_all()))
"""


def run_programs(folder: Path, *options: str) -> Said:
    script = write_script(folder, SCRIPT)
    emulator = (*EMULATOR, *machine(folder), "--devices", "2", *options)
    done = run(*emulator, script, cwd=folder, pythonpath=ROOT)
    assert done.returncode == 0, done.stderr
    said: Said = json.loads(done.stdout)
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    return run_programs(tmp_path_factory.mktemp("late"), "--schedule", "late")


def test_a_collective_ends_for_all_when_the_last_has_come_and_its_bytes_have_gone_round(said: Said) -> None:
    # 12 to start; 1 MB at 20 GB/s, all that two cards have between them. Rank 1 comes at 64.
    assert said["they_meet"] == [
        [[20, 156], [["HcclAllReduce", 20, 126]]],
        [[40, 156], [["memset", 20, 64], ["HcclAllReduce", 64, 126]]],
    ]


def test_a_collective_runs_beside_what_is_computed(said: Said) -> None:
    spans = [
        ["memset", 40, 64],
        ["HcclAllReduce", 20, 82],
        ["memset", 90, 114],
        ["HcclAllReduce", 82, 144],
        ["memset", 144, 150],
    ]
    assert said["beside_computing"] == [[180, spans]] * 2


def test_how_long_a_process_takes_and_who_polls_meanwhile_means_nothing(said: Said) -> None:
    # Asked from 26 on, once a microsecond; the record costs 5.
    assert said["a_late_host"] == [[[57, 82], [["HcclAllReduce", 20, 82]]], [[0, 20], [["HcclAllReduce", 20, 82]]]]


def test_a_receive_ends_with_its_send(said: Said) -> None:
    assert said["sent"] == [
        [132, [["memset", 20, 34], ["HcclSend", 40, 102]]],
        [132, [["HcclRecv", 20, 102]]],
    ]


def test_a_rank_whose_host_waits_for_another_one_is_no_hindrance(said: Said) -> None:
    assert [spans[-1] for _, spans in said["met_outside"]] == [
        ["HcclAllReduce", 20, 126],
        ["HcclAllReduce", 64, 126],
    ]


def test_a_receive_may_be_issued_long_before_what_leads_to_its_send(said: Said) -> None:
    (_, first), (_, second) = said["received_early"]
    assert first[-1] == ["HcclRecv", 20, second[-1][2]]


def test_two_communicators_may_be_used_in_opposite_orders(said: Said) -> None:
    spans = [["HcclAllReduce", *times] for times in ([20, 72.2], [60, 72.2], [72.2, 92.2], [80, 92.2])]
    assert [found for _, found in said["crossed"]] == [spans] * 2


def test_collectives_end_together(said: Said) -> None:
    ranks = [[span for span in spans if span[0] == "HcclAllReduce"] for _, spans in said["whatever"]]
    pairs = list(zip(*ranks, strict=True))
    together = [mine for mine, theirs in pairs if mine[2] == theirs[2]]
    assert len(together) > 0.9 * len(pairs) > 50
    for mine, theirs in pairs:
        # Or one was held up, until after that, by what was issued since the end was foreseen.
        assert mine in together or max(mine, theirs, key=lambda span: span[2])[1] == max(mine[2], theirs[2])


@pytest.mark.slow(why="four more runs; that no schedule counts is seen by the figures above")
@pytest.mark.parametrize("options", [(), ("--schedule", "late"), ("--schedule", "random"), ("--races",)], ids=str)
def test_two_runs_tell_the_same_nanoseconds(options: tuple[str, ...], said: Said, tmp_path: Path) -> None:
    assert run_programs(tmp_path, *options) == said
